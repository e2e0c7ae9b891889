"""Models by name or by their sizes, and the batch that they are trained with."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from shoal.errors import BadInput
from shoal.plan.transformer import MIXED, Transformer, TransformerSizes
from shoal.plan.workload import Precision, Workload

PRECISIONS = {"mixed": MIXED, "fp32": Precision("fp32", 4, 4, 0, 8)}
_TOKENS = 4 * 2**20  # of a batch: GPT-3 had 3.2 million, Llama 2 and 3 had 4 million
_SAMPLES_A_WORKER = 16  # at most, by default
_NAMED = {"gpt-3": TransformerSizes(96, 12288, 96, vocab=50257)}


def named_workload(
    name: str | None, sizes: str | None = None, precision: str | None = None
) -> Transformer | None:
    """A transformer by its name, or by sizes such as `layers=96,hidden=12288`; None: no such."""
    if precision is not None and precision not in PRECISIONS:
        raise BadInput(f"--precision is {' or '.join(PRECISIONS)}, not {precision!r}")
    chosen = PRECISIONS[precision or "mixed"]
    if sizes is not None:
        return Transformer("the transformer", _sizes(sizes), chosen)
    if name in _NAMED:
        return Transformer(name, _NAMED[name], chosen)
    return None


def _sizes(text: str) -> TransformerSizes:
    known = [field.name for field in fields(TransformerSizes)]
    given: dict[str, Any] = {}
    for word in text.split(","):
        key, _, value = word.partition("=")
        if key not in known or not value.isdigit():
            raise BadInput(
                f"--gpt: {word!r} is no size such as layers=96; sizes: {', '.join(known)}"
            )
        given[key] = int(value)
    return TransformerSizes(**given)


def default_batch(workload: Workload, workers: int) -> int:
    """Samples of about 4 million tokens, at most 16 and at least 1 for each worker."""
    sequence = max(1, workload.limits.cp)
    return max(workers, min(_TOKENS // sequence, _SAMPLES_A_WORKER * workers))
