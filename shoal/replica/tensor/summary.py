"""One line at the start: what tp has split, and what is whole."""

from __future__ import annotations

import re

from torch import nn
from torch.nn.modules.conv import _ConvNd

from shoal.replica.tensor.parallelize import TensorSplit

_KINDS = {
    "norms": r"norm|(^|\.)ln_?\w*\.|layer_?scale|\.gamma$|\.beta$",
    "position embeddings": r"pos(ition)?(s|al)?_?(embed|enc)\w*|wpe|embed_positions|rel_pos",
    "token type embeddings": r"token_type|segment_emb",
    "routers": r"router|\.gate\.weight$",
    "shared key and value heads": r"(^|\.)w?[kv](_proj|_lin)?\.(weight|bias)$|\.(key|value)\.",
    "biases": r"bias$",
}
_FEW = 3


def summary(split: TensorSplit) -> str:
    """Such as: tp(2) splits 34 of 52 tensors, 93% of the parameters; whole: norms, biases."""
    sizes = split.full_sizes()
    cut = {name for name in sizes if name in split.specs}
    share = sum(sizes[name] for name in cut) / max(1, sum(sizes.values()))
    if not cut:
        return (
            f"tp({split.group.size}) splits nothing of {type(split.model).__name__}, which every "
            f"worker holds whole ({', '.join(_kinds(sizes, split.model))}); name layers, as in "
            f'tp({split.group.size}, plan={{"blocks.*.up": "column", "blocks.*.down": "row"}})'
        )
    text = (
        f"tp({split.group.size}) splits {len(cut)} of {len(sizes)} tensors, {share:.0%} of the "
        "parameters"
    )
    if share < 0.5:
        text += ", which is less than half of them"
    kept = {name: size for name, size in sizes.items() if name not in cut}
    return f"{text}; whole: {', '.join(_kinds(kept, split.model))}" if kept else text


def _kinds(sizes: dict[str, int], model: nn.Module) -> list[str]:
    """What tensors are, the largest kinds first."""
    totals: dict[str, int] = {}
    for name, size in sizes.items():
        kind = _kind(name, model.get_submodule(name.rpartition(".")[0]))
        totals[kind] = totals.get(kind, 0) + size
    ordered = sorted(totals, key=lambda kind: -totals[kind])
    others = ordered[_FEW + 1 :]
    return [*ordered[: _FEW + 1], *([f"{len(others)} more"] if others else [])]


def _kind(name: str, module: nn.Module) -> str:
    if isinstance(module, _ConvNd):
        return "convolutions"
    if isinstance(module, nn.RNNBase):
        return "recurrent layers"
    for kind, pattern in _KINDS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    owner = name.rpartition(".")[0] or name
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", owner)
