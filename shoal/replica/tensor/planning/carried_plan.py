"""The plan of tensor parallelism that a Hugging Face model carries itself.

A model class has `_tp_plan`, its configuration `base_model_tp_plan`; both map names with `*` for
the numbers of layers to styles, and newer models merge them into `_tp_plan` of the instance.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import nn

from shoal.replica.deferred_init import full_name
from shoal.replica.tensor.planning.blocks import SplitBlock

COLUMN = ("colwise", "packed_colwise", "local_colwise")
ROW = ("rowwise", "packed_rowwise", "local_rowwise")
GATHERED_COLUMN = ("colwise_gather_output", "colwise_rep")
SCATTERED_ROW = ("rowwise_split_input", "rowwise_rep")
VOCABULARY = ("embedding_rowwise",)
_HEADS = {"q", "k", "v", "query", "key", "value", "qkv", "wqkv", "kv"}


def carried_styles(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """The style of each module that a plan names."""
    styles: dict[str, str] = {}
    for prefix, module in modules.items():
        for pattern, style in _plan_of(module).items():
            matches = re.compile(re.escape(full_name(prefix, pattern)).replace(r"\*", r"\d+"))
            for name in modules:
                if matches.fullmatch(name):
                    styles.setdefault(name, style)
    return styles


def _plan_of(module: nn.Module) -> dict[str, str]:
    own = getattr(module, "_tp_plan", None)
    plan = dict(own) if isinstance(own, dict) else {}
    if getattr(module, "base_model", None) is module:
        base = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        plan = {**(base or {}), **plan}
    return {str(k): v for k, v in plan.items() if isinstance(v, str)}


def carried_blocks(styles: Mapping[str, str]) -> Iterator[SplitBlock]:
    """Layers of one module that a plan splits by column, and the one that it splits by row."""
    by_parent: dict[str, list[str]] = defaultdict(list)
    for name in styles:
        by_parent[name.rpartition(".")[0]].append(name)
    for parent, names in by_parent.items():
        columns = tuple(n for n in names if styles[n] in COLUMN)
        rows = [n for n in names if styles[n] in ROW]
        if columns and len(rows) == 1:
            keys = [n.rpartition(".")[2] for n in columns]
            is_attention = any(_HEADS & set(key.lower().split("_")) for key in keys)
            yield SplitBlock(parent, columns, rows[0], is_attention, len(columns) == 1)
