"""One line at the start: what tp has split, and what is whole."""

from __future__ import annotations

import re
from collections.abc import Iterable

from shoal.replica.tensor.parallelize import TensorSplit

_KINDS = {
    "norms": r"norm|(^|\.)ln_?\w*\.|layer_?scale|\.gamma$|\.beta$",
    "position embeddings": r"pos(ition)?(s|al)?_?(embed|enc)\w*|wpe|embed_positions|rel_pos",
    "token type embeddings": r"token_type|segment_emb",
    "routers": r"router|\.gate\.weight$",
    "shared key and value heads": r"(^|\.)w?[kv](_proj|_lin)?\.(weight|bias)$|\.(key|value)\.",
    "biases": r"bias$",
    "convolutions": r"conv",
}
_FEW = 3


def summary(split: TensorSplit) -> str:
    """Such as: tp(2) splits 34 of 52 tensors, 93% of the parameters; whole: norms, biases."""
    sizes = split.full_sizes()
    cut = {name for name in sizes if name in split.specs}
    share = sum(sizes[name] for name in cut) / max(1, sum(sizes.values()))
    text = (
        f"tp({split.group.size}) splits {len(cut)} of {len(sizes)} tensors, {share:.0%} of the "
        "parameters"
    )
    if share < 0.5:
        text += ", which is less than half of them"
    kept = {name: size for name, size in sizes.items() if name not in cut}
    return f"{text}; whole: {', '.join(_kinds(kept))}" if kept else text


def _kinds(sizes: dict[str, int]) -> Iterable[str]:
    """What tensors are, the largest kinds first."""
    totals: dict[str, int] = {}
    for name, size in sizes.items():
        kind = _kind(name)
        totals[kind] = totals.get(kind, 0) + size
    ordered = sorted(totals, key=lambda kind: -totals[kind])
    others = ordered[_FEW + 1 :]
    return [*ordered[: _FEW + 1], *([f"{len(others)} more"] if others else [])]


def _kind(name: str) -> str:
    for kind, pattern in _KINDS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    module = name.rpartition(".")[0] or name
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", module)
