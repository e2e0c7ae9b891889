"""Column layers of a model and the row layers behind them.

    attention      q, k, v (or one fused layer) ─ heads ─ output
    MLP            widen ─ elementwise ─ narrow;   gated: two layers that widen

Known are layers of nn.Sequential and nn.Transformer, of GPT-2 of transformers, and those that a
module's `split_plan()` or a model's own plan names. What else is found by names and shapes is a
guess, which `split_check.py` compares with the model before the first step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn import functional as F

from shoal.replica.deferred_init import full_name, is_in
from shoal.replica.split.mapping import ShardSpec
from shoal.replica.tensor.linear import LinearLike, is_transformers, linear_like

_QUERIES = {"q": ("k", "v"), "wq": ("wk", "wv"), "query": ("key", "value"), "Q": ("K", "V")}
_FUSED = ("qkv", "query_key_value", "Wqkv", "c_attn", "qkv_proj", "in_proj_qkv", "to_qkv")
_INTERLEAVED = ("query_key_value",)  # all of one head stands together
_NARROW = ("down", "w2", "wo", "fc2", "fc_out", "lin2", "c_proj", "linear2", "dense_4h_to_h", "out")
_NOT_ELEMENTWISE = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU)
_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.ELU, nn.SELU, nn.CELU),
    *(nn.LeakyReLU, nn.Mish, nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Dropout, nn.Identity),
)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_NESTED_MLPS = (("intermediate", "output"), ("ffn", "ffn_output"))


@dataclass(frozen=True)
class SplitBlock:
    """Column layers and the row layer behind them, by name; `around` is what counts heads.

    The units are runs of features that stay on one rank. A column layer has as many features as
    the row layer takes, so many times (`blocks`).
    """

    around: str
    columns: tuple[str, ...]
    row: str
    is_attention: bool = False
    is_interleaved: bool = False  # one fused layer: queries, keys and values of a head together
    column_unit: int = 1
    row_unit: int = 1
    blocks: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Layers:
    """The modules of a model by name, and those that are linear layers."""

    modules: Mapping[str, nn.Module]
    linear: Mapping[str, LinearLike]

    def children(self, parent: str) -> dict[str, LinearLike]:
        """The linear layers among the children of a module, by their own name."""
        names = {key: full_name(parent, key) for key in self.modules[parent]._modules}
        return {key: self.linear[name] for key, name in names.items() if name in self.linear}


def known_blocks(name: str, module: nn.Module) -> Iterator[SplitBlock]:
    """The pairs among the children of a module of a known class, or that its own plan names."""
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        if module.activation in (F.relu, F.gelu) or isinstance(module.activation, _ELEMENTWISE):
            yield _pair(name, "linear1", "linear2")
    elif is_transformers(module, "GPT2MLP"):
        yield _pair(name, "c_fc", "c_proj")
    elif is_transformers(module, "GPT2Attention"):
        if not getattr(module, "is_cross_attention", True):
            unit = int(module.head_dim)  # type: ignore[arg-type]
            yield _pair(name, "c_attn", "c_proj", unit, unit, (3,))
    elif isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        yield from _pairs_of_sequential(name, module)
    elif callable(getattr(module, "split_plan", None)):
        column: tuple[str, int] | None = None
        for key, (kind, unit) in module.split_plan().items():  # type: ignore[operator]
            if kind == "column":
                column = (key, unit)
            elif column is not None:
                yield _pair(name, column[0], key, column[1], unit)


def _pair(name: str, column: str, row: str, *sizes: Any) -> SplitBlock:
    """`sizes` are those that a block ends with: two units, and `blocks`."""
    columns = (full_name(name, column),)
    return SplitBlock(name, columns, full_name(name, row), False, False, *sizes)


def _pairs_of_sequential(name: str, container: nn.Sequential) -> Iterator[SplitBlock]:
    """Neighbouring nn.Linear with elementwise layers between them, each in one pair."""
    first: str | None = None
    for key, module in container.named_children():
        if linear_like(module) is not None:
            if first is not None:
                yield _pair(name, first, key)
            first = key if first is None else None
        elif type(module) not in _ELEMENTWISE:
            first = None


def find_blocks(modules: Mapping[str, nn.Module]) -> Iterator[SplitBlock]:
    found = {name: linear_like(module) for name, module in modules.items()}
    layers = Layers(modules, {name: linear for name, linear in found.items() if linear is not None})
    for name, module in modules.items():
        if callable(getattr(module, "split_plan", None)):
            continue
        attention = _attention_in(layers, name)
        if attention is not None:
            yield attention
            continue
        mlp = _mlp_in(layers, name) or _nested_mlp_in(layers, name)
        if mlp is not None:
            yield mlp


# ------------------------------------------------------------------ attention


def _attention_in(layers: Layers, name: str) -> SplitBlock | None:
    children = layers.children(name)
    for columns in _projections(children):
        fused = len(columns) == 1
        width = None if fused else children[columns[0]].outputs
        full = tuple(full_name(name, key) for key in columns)
        row = _output_of(layers, name, full, width)
        if row is not None:
            return SplitBlock(name, full, row, True, fused and columns[0] in _INTERLEAVED)
    return None


def _projections(children: Mapping[str, LinearLike]) -> Iterator[tuple[str, ...]]:
    """Names of queries, keys and values."""
    for key in children:
        if key in _FUSED:
            yield (key,)
        parts = key.split("_")
        for i, part in enumerate(parts):
            others = _QUERIES.get(part, _QUERIES.get(part.lower(), ()))
            words = [w.capitalize() if part[0].isupper() else w for w in others]
            names = ["_".join([*parts[:i], word, *parts[i + 1 :]]) for word in words]
            if names and all(n in children for n in names):
                yield (key, *names)


def _output_of(
    layers: Layers, name: str, columns: tuple[str, ...], width: int | None
) -> str | None:
    """The only other layer inside the module, or in one that stands beside it."""
    fitting = [n for n, x in layers.linear.items() if width is None or x.inputs == width]
    found = [n for n in fitting if is_in(n, name) and n not in columns]
    parent = name.rpartition(".")[0]
    if not found and name and parent in layers.modules and width is not None:
        found = [n for n in fitting if is_in(n, parent) and not is_in(n, name)]
    return found[0] if len(found) == 1 else None


# ------------------------------------------------------------------ MLPs


def _mlp_in(layers: Layers, name: str) -> SplitBlock | None:
    """All linear children: one or two that widen, and the one that narrows."""
    module = layers.modules[name]
    children = layers.children(name)
    is_other = "attention" in type(module).__name__.lower() or any(_projections(children))
    if is_other or isinstance(module, (*_CONTAINERS, nn.MultiheadAttention)):
        return None
    if any(isinstance(inner, nn.ModuleList) for inner in module.modules()):
        return None  # blocks stand between its layers, as between project_in and project_out of OPT
    for down, narrow in children.items():
        ups = [
            key
            for key, wide in children.items()
            if key != down and wide.outputs in (narrow.inputs, 2 * narrow.inputs)
        ]
        if len(ups) + 1 != len(children) or not 1 <= len(ups) <= 2:
            continue
        inputs = {children[key].inputs for key in ups}
        widens = len(inputs) == 1 and narrow.inputs > min(inputs)
        is_last = list(children)[-1] == down or _is_narrow(down)
        if (widens or _is_narrow(down)) and is_last and not _has_norm(layers, name, narrow.inputs):
            if _has_layer_between(module, ups[0], down, narrow.inputs):
                continue
            columns = tuple(full_name(name, k) for k in ups)
            return SplitBlock(name, columns, full_name(name, down), blocks=(1, 2))
    return None


def _is_narrow(key: str) -> bool:
    return key in _NARROW or bool(re.match(r"(down|w2|wo|fc2|fc_out)\b|down_|.*_out$", key))


def _has_norm(layers: Layers, name: str, width: int) -> bool:
    """Whether a norm over all features between the two layers may stand there."""
    for child in layers.modules[name]._modules.values():
        if child is None or linear_like(child) is not None:
            continue
        shape = getattr(child, "normalized_shape", None)
        is_wide = any(p is not None and p.shape == (width,) for p in child._parameters.values())
        if is_wide or shape == (width,) or isinstance(child, _NOT_ELEMENTWISE):
            return True
    return False


def _has_layer_between(module: nn.Module, first: str, last: str, width: int) -> bool:
    """Whether a layer over all features stands there: a decoder's nn.LSTM, a depthwise Conv2d."""
    keys = list(module._modules)
    between = keys[keys.index(first) + 1 : max(keys.index(last), keys.index(first) + 1)]
    return any(
        p.dim() > 1
        for child in map(module._modules.get, between)
        if child is not None and linear_like(child) is None  # it is not the other one that widens
        for layer in child.modules()
        if not isinstance(layer, nn.Embedding)
        if not isinstance(layer, nn.modules.conv._ConvNd) or layer.in_channels == width
        for p in layer.parameters(recurse=False)
    )


def _nested_mlp_in(layers: Layers, name: str) -> SplitBlock | None:
    """As in BERT: `intermediate.dense`, an activation, and `output.dense`."""
    for first, second in _NESTED_MLPS:
        up = _only_linear(layers, full_name(name, first))
        down = _only_linear(layers, full_name(name, second))
        if up is None or down is None:
            continue
        if layers.linear[up].outputs == layers.linear[down].inputs:
            return SplitBlock(name, (up,), down)
    return None


def _only_linear(layers: Layers, name: str) -> str | None:
    if name not in layers.modules:
        return None
    if name in layers.linear:
        return name
    inside = [n for n in layers.linear if is_in(n, name)]
    return inside[0] if len(inside) == 1 else None


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
            fused = len(columns) == 1
            yield SplitBlock(parent, columns, rows[0], is_attention, fused, blocks=(1, 2))


def expert_shards(module: nn.Module, ranks: int) -> dict[str, ShardSpec] | None:
    """Experts as one tensor per layer; kernels for groups want rows of a multiple of 16 bytes."""
    up = module._parameters.get("gate_up_proj")
    blocks = 2
    if up is None:
        up = module._parameters.get("up_proj")
        blocks = 1
    down = module._parameters.get("down_proj")
    if up is None or down is None or up.dim() != 3 or down.dim() != 3 or len(up) != len(down):
        return None
    if sum(p is not None for p in module._parameters.values()) != 2:
        return None
    transposed = bool(getattr(module, "is_transposed", up.shape[1] == down.shape[2]))
    width = down.shape[1 if transposed else 2]
    if up.shape[2 if transposed else 1] != blocks * width or width < ranks:
        return None
    if blocks == 2 and not getattr(module, "is_concatenated", True):
        return None
    name = "gate_up_proj" if blocks == 2 else "up_proj"
    unit = next(u for u in (8, 4, 2, 1) if width % u == 0 and width // u >= ranks)
    return {
        name: ShardSpec.of_blocks(2 if transposed else 1, blocks, width, ranks, unit),
        "down_proj": ShardSpec.even(1 if transposed else 2, width, ranks, unit),
    }
