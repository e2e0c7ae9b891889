"""Transformers by name (`gpt-3`, `llama-3-70b`), or by their sizes (`layers=96,hidden=12288`).

Sizes are those that the models' papers and configuration files publish. A name may be followed by
changes: `llama-3-70b,sequence=4096`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

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


_gpt2 = partial(TransformerSizes, vocab=50257, sequence=1024, dropout=False)
_gpt3 = partial(TransformerSizes, vocab=50257, sequence=2048)


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> TransformerSizes:
    """Llama 2; Llama 3 has a larger vocabulary and longer sequences."""
    sizes = TransformerSizes(layers, hidden, heads, 32000, 4096, kv_heads, ffn, gated=True)
    return replace(sizes, dropout=False, tied=False, learned_positions=False)


def _llama3(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> TransformerSizes:
    return replace(_llama(layers, hidden, heads, kv_heads, ffn), vocab=128256, sequence=8192)


_mixtral = partial(replace, experts=8, top_k=2)
_qwen = partial(replace, vocab=152064)  # 2.5; the small ones tie the head to the embedding
# its router sends a token to at most 4 of 8 groups of experts
_deepseek = partial(replace, vocab=129280, experts=256, top_k=8, shared_experts=1, token_groups=4)
_latent = partial(replace, head=128, rope=64, dense_layers=3, dense_ffn=18432)
_qwen3 = partial(replace, vocab=151936, head=128, experts=128, top_k=8)
_gpt_oss = partial(replace, _llama(24, 2880, 64, 8, 2880), vocab=201088, head=64, top_k=4)
# an image is a sequence of patches and a class token; the head has 1,000 classes
_vit = partial(TransformerSizes, vocab=1000, dropout=False, tied=False, causal=False)

PRESETS: dict[str, TransformerSizes] = {
    "gpt-2": _gpt2(12, 768, 12),
    "gpt-2-medium": _gpt2(24, 1024, 16),
    "gpt-2-large": _gpt2(36, 1280, 20),
    "gpt-2-xl": _gpt2(48, 1600, 25),
    "gpt-3": _gpt3(96, 12288, 96),
    "gpt-3-1.3b": _gpt3(24, 2048, 16),
    "gpt-3-2.7b": _gpt3(32, 2560, 32),
    "gpt-3-6.7b": _gpt3(32, 4096, 32),
    "gpt-3-13b": _gpt3(40, 5120, 40),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672),
    "llama-3-8b": _llama3(32, 4096, 32, 8, 14336),
    "llama-3-70b": _llama3(80, 8192, 64, 8, 28672),
    "llama-3.1-8b": _llama3(32, 4096, 32, 8, 14336),
    "llama-3.1-70b": _llama3(80, 8192, 64, 8, 28672),
    "llama-3.1-405b": _llama3(126, 16384, 128, 8, 53248),
    "llama-3.2-1b": replace(_llama3(16, 2048, 32, 8, 8192), tied=True),
    "llama-3.2-3b": replace(_llama3(28, 3072, 24, 8, 8192), tied=True),
    "llama-3.3-70b": _llama3(80, 8192, 64, 8, 28672),
    "qwen-2.5-0.5b": _qwen(_llama(24, 896, 14, 2, 4864), vocab=151936, tied=True),
    "qwen-2.5-1.5b": _qwen(_llama(28, 1536, 12, 2, 8960), vocab=151936, tied=True),
    "qwen-2.5-3b": _qwen(_llama(36, 2048, 16, 2, 11008), vocab=151936, tied=True),
    "qwen-2.5-7b": _qwen(_llama(28, 3584, 28, 4, 18944)),
    "qwen-2.5-14b": _qwen(_llama(48, 5120, 40, 8, 13824)),
    "qwen-2.5-32b": _qwen(_llama(64, 5120, 40, 8, 27648)),
    "qwen-2.5-72b": _qwen(_llama(80, 8192, 64, 8, 29568)),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336),
    "mistral-large": replace(_llama(88, 12288, 96, 8, 28672), vocab=32768),
    "mixtral-8x7b": _mixtral(_llama(32, 4096, 32, 8, 14336)),
    "mixtral-8x22b": _mixtral(replace(_llama(56, 6144, 48, 8, 16384), vocab=32768)),
    "deepseek-v3": _latent(_deepseek(_llama(61, 7168, 128, 128, 2048)), q_rank=1536, kv_rank=512),
    "gpt-oss-20b": _gpt_oss(layers=24, experts=32),
    "gpt-oss-120b": _gpt_oss(layers=36, experts=128),
    "qwen-3-30b-a3b": _qwen3(_llama(48, 2048, 32, 4, 768)),
    "qwen-3-235b-a22b": _qwen3(_llama(94, 4096, 64, 4, 1536)),
    "bert-base": TransformerSizes(12, 768, 12, vocab=30522, sequence=512, causal=False),
    "bert-large": TransformerSizes(24, 1024, 16, vocab=30522, sequence=512, causal=False),
    "vit-b-16": _vit(12, 768, 12, sequence=197),
    "vit-l-16": _vit(24, 1024, 16, sequence=197),
    "vit-h-14": _vit(32, 1280, 16, sequence=257),
}
_ALIASES = {
    "llama-3-405b": "llama-3.1-405b",
    "mixtral": "mixtral-8x7b",
    "vit-l": "vit-l-16",
    "vit-h": "vit-h-14",
}
_BF16 = (
    "deepseek",
    "gpt-oss",
    "llama",
    "mistral",
    "mixtral",
    "qwen",
)  # as those who published them trained


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
    chosen = _PRECISIONS["bf16"] if preset.startswith(_BF16) else MIXED
    precision = options.pop("precision", chosen)
    shown = ",".join([preset, *(f"{key}={value}" for key, value in options.items())])
    return Transformer(shown, replace(PRESETS[preset], **options), precision)


def _known(name: str) -> str | None:
    names = {preset: preset for preset in PRESETS} | _ALIASES
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
