"""Views of a `ChannelShardedTensor`: which dimension is sharded afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.replica.tensor.activations.channel_tensor import ChannelShardedTensor
from shoal.replica.tensor.activations.sharded_tensor import ShardedOps, reshaped
from shoal.replica.tensor.activations.spec_views import concatenated, narrowed, reshaped_spec


def _shape(x: ChannelShardedTensor) -> torch.Size:
    return x.full_shape


def _size(x: ChannelShardedTensor, dim: int | None = None) -> Any:
    return x.full_shape if dim is None else x.full_shape[dim]


def _numel(x: ChannelShardedTensor) -> int:
    return x.full_shape.numel()


def _len(x: ChannelShardedTensor) -> int:
    return x.full_shape[0]


def _new(name: str) -> Any:
    """`new_zeros` and the like: a tensor of another shape, for which only the kind is asked."""

    def apply(x: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(x.local, name)(*args, **kwargs)

    return apply


def _reshape(x: ChannelShardedTensor, *shape: Any, **kwargs: Any) -> Any:
    if kwargs or (len(shape) == 1 and isinstance(shape[0], torch.dtype)):
        return None
    old = x.full_shape
    new = reshaped(old, shape)
    spec = None if new is None else reshaped_spec(x.spec, old, new)
    if new is None or spec is None:
        return None
    return x.like(x.local.reshape(spec.shard_shape(new, x.group.rank)), spec)


def _flatten(x: ChannelShardedTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    shape = torch.empty(x.full_shape, device="meta").flatten(start_dim, end_dim).shape
    return _reshape(x, shape)


def _unflatten(x: ChannelShardedTensor, dim: int, sizes: Any) -> Any:
    shape = torch.empty(x.full_shape, device="meta").unflatten(dim, sizes).shape  # type: ignore[no-untyped-call]
    return _reshape(x, shape)


def _permute(x: ChannelShardedTensor, *dims: Any) -> Any:
    order = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    order = [dim % x.local.dim() for dim in order]
    return x.at(x.local.permute(order), order.index(x.spec.dim))


def _transpose(x: ChannelShardedTensor, dim0: int, dim1: int) -> Any:
    order = list(range(x.local.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(x, order)


def _unsqueeze(x: ChannelShardedTensor, dim: int) -> Any:
    at = dim % (x.local.dim() + 1)
    return x.at(x.local.unsqueeze(dim), x.spec.dim + (at <= x.spec.dim))


def _squeeze(x: ChannelShardedTensor, dim: Any = None) -> Any:
    shape = x.full_shape
    given = range(len(shape)) if dim is None else (dim,) if isinstance(dim, int) else dim
    dims = {d % len(shape) for d in given if shape[d] == 1}
    if x.spec.dim in dims:
        return None
    kept = [size for d, size in enumerate(x.local.shape) if d not in dims]
    return x.at(x.local.reshape(kept), x.spec.dim - sum(d < x.spec.dim for d in dims))


def _unbind(x: ChannelShardedTensor, dim: int = 0) -> Any:
    at = dim % x.local.dim()
    if at == x.spec.dim:
        return None
    return tuple(x.at(part, x.spec.dim - (at < x.spec.dim)) for part in x.local.unbind(at))


def _split(x: ChannelShardedTensor, sizes: Any, dim: int = 0) -> Any:
    at = dim % x.local.dim()
    if isinstance(sizes, int):
        full = x.full_shape[at]
        sizes = [min(sizes, full - start) for start in range(0, full, sizes)]
    if at != x.spec.dim:
        return tuple(x.like(part) for part in torch.split(x.local, list(sizes), at))
    starts = itertools.accumulate(sizes, initial=0)
    specs = [narrowed(x.spec, start, size) for start, size in zip(starts, sizes, strict=False)]
    if not all(ranges for spec in specs for ranges in spec.ranges):
        return None  # a rank would have none
    parts = torch.split(x.local, [spec.length(x.group.rank) for spec in specs], at)
    return tuple(x.like(part, spec) for part, spec in zip(parts, specs, strict=True))


def _chunk(x: ChannelShardedTensor, chunks: int, dim: int = 0) -> Any:
    size = x.full_shape[dim]
    return _split(x, -(-size // chunks), dim)


def _getitem(x: Any, index: Any) -> Any:
    """Indices along other dimensions; the sharded one is taken as it is."""
    if not isinstance(x, ChannelShardedTensor):
        return None
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in items):
        return None
    named = sum(item is not None and item is not Ellipsis for item in items)
    rest = [slice(None)] * (x.local.dim() - named)
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    items[at : at + 1] = rest
    dims = iter(range(x.local.dim()))
    of_item = [None if item is None else next(dims) for item in items]
    position = of_item.index(x.spec.dim)
    if items[position] != slice(None):
        return None
    dim = sum(not isinstance(item, int) for item in items[:position])
    return x.at(x.local[tuple(items)], dim)


def _cat(tensors: Sequence[Any], dim: int = 0, **kwargs: Any) -> Any:
    first = next(t for t in tensors if isinstance(t, ChannelShardedTensor))
    at = dim % first.local.dim()
    if at == first.spec.dim:
        if not all(isinstance(t, ChannelShardedTensor) and t.spec.dim == at for t in tensors):
            return None
        spec = concatenated([t.spec for t in tensors])
        return first.like(torch.cat([t.local for t in tensors], at), spec)
    shards = [first.operand(t) for t in tensors]
    if kwargs or any(shard is None for shard in shards):
        return None
    return first.like(torch.cat(shards, at))


def _expand(x: ChannelShardedTensor, *sizes: Any) -> Any:
    wanted = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    dim = len(wanted) - x.from_right
    if wanted[dim] not in (-1, x.spec.size):
        return None
    wanted[dim] = -1
    return x.at(x.local.expand(wanted), dim)


def _roll(x: ChannelShardedTensor, shifts: Any, dims: Any = None) -> Any:
    along = (dims,) if isinstance(dims, int) else dims
    if not along or x.spec.dim in {d % x.local.dim() for d in along}:
        return None
    return x.like(torch.roll(x.local, shifts, dims))


_BY_NAME: dict[str, Callable[..., Any]] = {
    "reshape": _reshape,
    "view": _reshape,
    "flatten": _flatten,
    "unflatten": _unflatten,
    "permute": _permute,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "unbind": _unbind,
    "split": _split,
    "chunk": _chunk,
    "expand": _expand,
    "roll": _roll,
    "numel": _numel,
    "__getitem__": _getitem,
}
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")

VIEWS: ShardedOps = {
    **{getattr(Tensor, name): function for name, function in _BY_NAME.items()},
    **{getattr(torch, n): function for n, function in _BY_NAME.items() if hasattr(torch, n)},
    **{getattr(Tensor, name): _new(name) for name in _NEW},
    Tensor.shape.__get__: _shape,  # type: ignore[attr-defined]
    Tensor.size: _size,
    Tensor.__len__: _len,
    torch.cat: _cat,
    torch.concat: _cat,
}
