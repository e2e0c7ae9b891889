"""Transformers by name (`gpt-3`, `llama-3-70b`), or by their sizes (`layers=96,hidden=12288`).

Names and their sizes are in models.toml. A name may be followed by changes:
`llama-3-70b,sequence=4096`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from shoal.cluster.program import PYTORCH, ModelProgram
from shoal.errors import BadInput
from shoal.plan.workloads import Precision, Workload
from shoal.plan.workloads.transformer_block import MIXED, Transformer, TransformerSizes
from shoal.runtime.wording import nearest

_PRECISIONS = {
    "fp16": MIXED,
    "bf16": Precision("bf16", 2, 2, 4, 8),
    "fp8": Precision("fp8", 2, 2, 4, 8),  # products of weights; the rest is bf16
    "fp32": Precision("fp32", 4, 4, 0, 8),
    "tf32": Precision("tf32", 4, 4, 0, 8),
}
AUTOCAST = Precision("bf16", 4, 4, 0, 8)
_SHORT = {"seq": "sequence", "s": "sequence", "h": "hidden", "l": "layers", "a": "heads"}
_SIZES = {f.name: f.type for f in fields(TransformerSizes)}
_NEEDED = ("layers", "hidden", "heads")
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


_MODELS = msgspec.toml.decode((Path(__file__).parent / "models.toml").read_bytes())
_FAMILIES = {name: family for family in _MODELS["family"] for name in family["models"]}
PRESETS = {
    name: TransformerSizes(
        **family["shared"], **dict(zip(family["columns"], family["models"][name], strict=True))
    )
    for name, family in _FAMILIES.items()
}


def is_transformer(text: str) -> bool:
    """Whether it is meant as the name or the sizes of a transformer, and not as a script."""
    first = text.split(",")[0].strip()
    return _known(first) is not None or ("=" in first and not text.endswith(".py"))


def transformer_named(text: str) -> Transformer:
    """`gpt-3`, `llama-3-70b,sequence=4096` or `layers=96,hidden=12288,heads=96`."""
    first, *others = (part.strip() for part in text.split(","))
    if "=" in first:
        options = _options(text, [first, *others])
        missing = [key for key in _NEEDED if key not in options]
        if missing:
            raise BadInput(f"the sizes {text!r} of a transformer lack {' and '.join(missing)}")
        precision = options.pop("precision", MIXED)
        name = f"gpt({options['layers']} layers of {options['hidden']})"
        return Transformer(name, TransformerSizes(**options), precision)
    preset = _known(first)
    if preset is None:
        raise BadInput(f"there is no transformer {first!r}; {nearest(first.lower(), PRESETS)}")
    options = _options(text, others)
    precision = options.pop("precision", _PRECISIONS[_FAMILIES[preset].get("precision", "fp16")])
    shown = ",".join([preset, *(f"{key}={value}" for key, value in options.items())])
    return Transformer(shown, replace(PRESETS[preset], **options), precision)


def _known(name: str) -> str | None:
    names = {preset: preset for preset in PRESETS} | _MODELS["aliases"]
    plain = {name.replace("-", ""): preset for name, preset in names.items()}
    wanted = name.strip().lower().replace("_", "").replace("-", "").replace(" ", "")
    return plain.get(wanted) or plain.get(wanted.removesuffix("175b"))


def _options(text: str, parts: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in parts:
        key, found, value = (piece.strip() for piece in part.partition("="))
        key = _SHORT.get(key.lower(), key.lower())
        if not found or not value:
            raise BadInput(f"{part!r} of {text!r} is not key=value, such as layers=96")
        if key in options:
            raise BadInput(f"{text!r} says {key} twice")
        options[key] = _value(text, key, value)
    return options


def _value(text: str, key: str, value: str) -> Any:
    if key == "precision":
        return _one_of(text, key, value, _PRECISIONS)
    if key not in _SIZES:
        hint = nearest(key, [*_SIZES, "precision"])
        raise BadInput(f"a transformer has no {key!r} ({text!r}); {hint}")
    if _SIZES[key] == "bool":
        return _one_of(text, key, value, _TRUTH)
    digits = value.replace("_", "")
    if not digits.isdigit() or int(digits) < 1:
        raise BadInput(f"{key}={value} of {text!r} is not a whole number above 0")
    return int(digits)


def _one_of(text: str, key: str, value: str, known: dict[str, Any]) -> Any:
    if value.lower() not in known:
        raise BadInput(f"{key}={value} of {text!r} is none of {', '.join(known)}")
    return known[value.lower()]


PRECISIONS = {"mixed": MIXED, "fp32": _PRECISIONS["fp32"]}
_TOKENS = 4 * 2**20  # of a batch: GPT-3 had 3.2 million, Llama 2 and 3 had 4 million
_SAMPLES_A_WORKER = 16  # at most, by default


def named_workload(
    name: str | None,
    sizes: str | None = None,
    precision: str | None = None,
    program: ModelProgram = PYTORCH,
) -> Transformer | None:
    """A transformer by its name, or by sizes such as `layers=96,hidden=12288`; None: no such.

    Weights are fp32 under autocast, unless a program of fused kernels keeps a copy of them.
    """
    if precision is not None and precision not in PRECISIONS:
        raise BadInput(f"--precision is {' or '.join(PRECISIONS)}, not {precision!r}")
    text = name if sizes is None else sizes
    if text is None or (sizes is None and not is_transformer(text)):
        return None
    model = transformer_named(text)
    if precision == "fp32":
        return replace(model, precision=PRECISIONS[precision])
    is_said = "precision=" in text
    return model if is_said or program.kernels == "fused" else replace(model, precision=AUTOCAST)


def default_batch(workload: Workload, workers: int) -> int:
    """Samples of about 4 million tokens, at most 16 and at least 1 for each worker."""
    sequence = max(1, workload.limits.cp)
    return max(workers, min(_TOKENS // sequence, _SAMPLES_A_WORKER * workers))
