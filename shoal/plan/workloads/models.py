"""Models by name or by their sizes, and the batch that they are trained with."""

from __future__ import annotations

from dataclasses import replace

from shoal.errors import BadInput
from shoal.plan.workloads.model_presets import is_transformer, transformer_named
from shoal.plan.workloads.transformer import MIXED, Transformer
from shoal.plan.workloads.workload import Precision, Workload

PRECISIONS = {"mixed": MIXED, "fp32": Precision("fp32", 4, 4, 0, 8)}
_TOKENS = 4 * 2**20  # of a batch: GPT-3 had 3.2 million, Llama 2 and 3 had 4 million
_SAMPLES_A_WORKER = 16  # at most, by default


def named_workload(
    name: str | None, sizes: str | None = None, precision: str | None = None
) -> Transformer | None:
    """A transformer by its name, or by sizes such as `layers=96,hidden=12288`; None: no such."""
    if precision is not None and precision not in PRECISIONS:
        raise BadInput(f"--precision is {' or '.join(PRECISIONS)}, not {precision!r}")
    text = name if sizes is None else sizes
    if text is None or (sizes is None and not is_transformer(text)):
        return None
    model = transformer_named(text)
    return model if precision is None else replace(model, precision=PRECISIONS[precision])


def default_batch(workload: Workload, workers: int) -> int:
    """Samples of about 4 million tokens, at most 16 and at least 1 for each worker."""
    sequence = max(1, workload.limits.cp)
    return max(workers, min(_TOKENS // sequence, _SAMPLES_A_WORKER * workers))
