"""Sums and means over positions; other reductions along other dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.replica.context.sequence_shard import SequenceShard
from shoal.replica.mapping import sum_over_ranks
from shoal.replica.sharded_tensor import ShardedCall, map_results


def _dims(op: ShardedCall, x: SequenceShard) -> list[int]:
    """The dimensions that are reduced."""
    dim = op.argument(1, "dim", op.kwargs.get("axis"))
    if dim is None or dim == () or dim == []:
        return list(range(x.dim()))
    return [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)]


def _keepdim(op: ShardedCall) -> bool:
    return bool(op.argument(2, "keepdim", False))


def _local(op: ShardedCall) -> Any:
    """Along other dimensions than that of the positions."""
    x = op.args[0]
    given = op.argument(1, "dim", op.kwargs.get("axis"))
    is_dim = isinstance(given, (int, tuple, list)) and not isinstance(given, bool)
    if not isinstance(x, SequenceShard) or not is_dim or "out" in op.kwargs:
        return NotImplemented
    dims = _dims(op, x)
    if x.spec.dim in dims:
        return NotImplemented
    result = op.function(x.local, *op.args[1:], **op.kwargs)

    def wrap(t: Tensor) -> Tensor:
        removed = sum(d < x.spec.dim for d in dims) if t.dim() < x.dim() else 0
        made: Tensor = op.context.wrap(t, x.spec.at(x.spec.dim - removed))
        return made

    return map_results(wrap, result)


def _sum(op: ShardedCall) -> Any:
    x = op.args[0]
    if isinstance(x, SequenceShard) and x.spec.dim not in _dims(op, x):
        return _local(op)
    if not isinstance(x, SequenceShard) or op.argument(3, "dtype") is not None:
        return NotImplemented
    total = _total(op, x)
    return total.to(x.dtype) if x.is_floating_point() else total


def _mean(op: ShardedCall) -> Any:
    x = op.args[0]
    if isinstance(x, SequenceShard) and x.spec.dim not in _dims(op, x):
        return _local(op)
    if not isinstance(x, SequenceShard) or op.argument(3, "dtype") is not None:
        return NotImplemented
    count = math.prod(x.full_shape[d] for d in _dims(op, x))
    return (_total(op, x) / count).to(x.dtype)


def _total(op: ShardedCall, x: SequenceShard) -> Tensor:
    """The sum along the dimensions of the call, over the positions of all ranks."""
    local = _wide(x.local).sum(_dims(op, x), keepdim=_keepdim(op))
    return sum_over_ranks(local, op.context.group)


def _wide(x: Tensor) -> Tensor:
    """A sum over positions may be larger than a half-precision number can be."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _norm(op: ShardedCall) -> Any:
    """`norm(p, dim, keepdim)`: the dimension comes second."""
    x = op.args[0]
    dim = op.argument(2, "dim")
    if not isinstance(x, SequenceShard) or not isinstance(dim, int) or dim % x.dim() == x.spec.dim:
        return NotImplemented
    result = op.function(x.local, *op.args[1:], **op.kwargs)
    removed = int(result.dim() < x.dim() and dim % x.dim() < x.spec.dim)
    return op.context.wrap(result, x.spec.at(x.spec.dim - removed))


_LOCAL = (
    "amax amin max min argmax argmin all any prod logsumexp var std median mode nansum nanmean "
    "count_nonzero var_mean std_mean"
)
RULES: dict[str, Callable[[ShardedCall], Any]] = {
    **dict.fromkeys(_LOCAL.split(), _local),
    "sum": _sum,
    "mean": _mean,
    "norm": _norm,
    "linalg_vector_norm": _norm,
    "vector_norm": _norm,
}
