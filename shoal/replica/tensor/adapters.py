"""Layers of other libraries that tp knows: nn.Transformer, and GPT-2 of transformers.

A new adapter is a case in `known_pairs`, and one in `adapt` if the module around the split layers
keeps a number of its own, or reaches around its children.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import copy as shallow_copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.pytree import map_tensors
from shoal.replica.split.mapping import copy, reduce
from shoal.replica.split.sharded_tensor import full_activations
from shoal.replica.tensor.linear import ColumnLinear, is_transformers
from shoal.replica.tensor.rng import TensorParallelRng
from shoal.replica.tensor.roles import Role

ELEMENTWISE = (
    nn.ReLU,
    nn.ReLU6,
    nn.GELU,
    nn.Tanh,
    nn.Sigmoid,
    nn.SiLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.LeakyReLU,
    nn.Mish,
    nn.Softplus,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Dropout,
    nn.Identity,
)


class LayerPair(NamedTuple):
    """A column and a row layer with elementwise operations, or heads, between them.

    Names are those of children. The units are runs of features that stay on one rank.
    """

    column: str
    row: str
    column_unit: int = 1
    row_unit: int = 1
    blocks: int = 1  # of the column layer: queries, keys and values stand one after the other


def known_pairs(module: nn.Module) -> Iterator[LayerPair]:
    """The pairs among the children of a module of another library."""
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        if module.activation in (F.relu, F.gelu) or isinstance(module.activation, ELEMENTWISE):
            yield LayerPair("linear1", "linear2")
    elif is_transformers(module, "GPT2MLP"):
        yield LayerPair("c_fc", "c_proj")
    elif is_transformers(module, "GPT2Attention") and not getattr(
        module, "is_cross_attention", True
    ):
        unit = int(module.head_dim)  # type: ignore[arg-type]
        yield LayerPair("c_attn", "c_proj", unit, unit, blocks=3)


def adapt(model: nn.Module, group: Group) -> None:
    """Change what modules around split layers would get wrong."""
    for module in model.modules():
        if is_transformers(module, "GPT2Attention"):
            _set_split_size(module, group)
        elif isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # no fast path in evaluation
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
            module.enable_nested_tensor = False


def _set_split_size(module: nn.Module, group: Group) -> None:
    """GPT-2's attention splits its queries, keys and values by a number that it keeps."""
    layer = getattr(module, "c_attn", None)
    if isinstance(layer, ColumnLinear):
        width = layer.spec.length(group.rank) // 3
        module.split_size = width  # type: ignore[assignment]


_EXPERT_WIDTHS = ("intermediate_dim", "intermediate_size", "expert_dim", "ffn_dim")


def change_in_place(module: nn.Module, role: Role, group: Group, rng: TensorParallelRng) -> None:
    """Before its parameters are sliced."""
    if role.heads is not None:
        role.heads.set_local_counts(module, group.rank)
    if role.kind == "experts":
        _set_expert_width(module, role, group.rank)
        _wrap_forward(module, partial(_add_up, group=group, rng=rng))
    elif role.kind in ("summed", "heads"):
        names = [name for name in module._parameters if name not in (role.shards or {})]
        if any(module._parameters[name] is not None for name in names):
            _wrap_forward(module, partial(_with_summed_gradients, module, names, group))


def _wrap_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    module.forward = partial(around, module.forward)


def _add_up(
    forward: Callable[..., Any], *args: Any, group: Group, rng: TensorParallelRng, **kwargs: Any
) -> Any:
    """Every rank computes a part of each expert; inputs have gradients of all ranks."""
    inputs, named = map_tensors(lambda x: _copied(x, group), (full_activations(args), kwargs))
    first = next(x for x in (*inputs, *named.values()) if isinstance(x, Tensor))
    with rng.forked(first) if rng.active else nullcontext():
        partial_sum = forward(*inputs, **named)
    return reduce(partial_sum, group)


def _copied(x: Tensor, group: Group) -> Tensor:
    return copy(x, group) if x.is_floating_point() and x.requires_grad else x


def _with_summed_gradients(
    module: nn.Module,
    names: list[str],
    group: Group,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Its own parameters are used on the shards that the ranks have of an activation."""
    own = {name: p for name in names if (p := module._parameters[name]) is not None}
    if not torch.is_grad_enabled() or not any(p.requires_grad for p in own.values()):
        return forward(*args, **kwargs)
    shared = {f"module.{name}": copy(p, group) for name, p in own.items()}
    return functional_call(_Call(module, forward), shared, args, kwargs)


class _Call(nn.Module):
    """A module that is called by its original forward."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]):
        super().__init__()
        self.module = module
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def _set_expert_width(module: nn.Module, role: Role, rank: int) -> None:
    down = (role.shards or {}).get("down_proj")
    if down is None:
        return
    for name in _EXPERT_WIDTHS:
        if getattr(module, name, None) == down.size:
            setattr(module, name, down.length(rank))
    config = getattr(module, "config", None)
    is_aligned = all(down.length(r) % 8 == 0 for r in range(len(down.ranges)))
    if hasattr(config, "_experts_implementation") and not is_aligned:
        own: Any = shallow_copy(config)  # kernels for groups want multiples of 16 bytes
        own._experts_implementation = "eager"
        module.config = own
