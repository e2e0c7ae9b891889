"""Sums and means over positions; other reductions along other dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.replica.context.sequence_shard import SequenceAlignment, SequenceShard
from shoal.replica.split.mapping import sum_over_ranks
from shoal.replica.split.sharded_tensor import NotAligned, ShardedCall, map_results


def _dims(op: ShardedCall, x: SequenceShard) -> list[int]:
    """The dimensions that are reduced."""
    dim = op.argument(1, "dim", op.kwargs.get("axis"))
    if dim is None or dim == () or dim == []:
        return list(range(x.dim()))
    return [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)]


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
    local = _wide(x.local).sum(_dims(op, x), keepdim=bool(op.argument(2, "keepdim", False)))
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


_LEGACY = {"size_average", "reduce"}


def _classified(op: ShardedCall) -> Any:
    """`cross_entropy` and `nll_loss`: classes are dimension 1, or 0 of a single sample."""
    given = dict(zip(_CLASSIFIED[op.name], op.args, strict=False)) | op.kwargs
    logits = given["input"]
    target = given["target"]
    if any(given.get(name) is not None for name in _LEGACY) or not isinstance(
        logits, SequenceShard
    ):
        return NotImplemented
    if logits.dim() < 2 or logits.spec.dim == 1 or isinstance(given.get("weight"), SequenceShard):
        return NotImplemented
    try:
        wanted = _target(op, logits, target)
    except NotAligned:
        return NotImplemented
    options = {
        name: given[name]
        for name in ("weight", "ignore_index", "label_smoothing")
        if given.get(name) is not None
    }
    reduction = given.get("reduction", "mean")
    function = F.cross_entropy if op.name == "cross_entropy" else F.nll_loss
    if reduction == "none":
        loss = function(logits.local, wanted, reduction="none", **options)
        dim = logits.spec.dim
        return op.context.wrap(loss, logits.spec.at(dim - int(dim > 1)))
    if reduction not in ("mean", "sum"):
        return NotImplemented
    here = function(logits.local, wanted, reduction="sum", **options)
    total = sum_over_ranks(here, op.context.group)
    return total / _count(op, logits, wanted, options) if reduction == "mean" else total


def _target(op: ShardedCall, logits: SequenceShard, target: Tensor) -> Tensor:
    """This rank's targets: classes without the dimension of classes, or probabilities with it."""
    spec = logits.spec
    if target.dim() == logits.dim() - 1:
        spec = spec.at(spec.dim - int(spec.dim > 1))
    if isinstance(target, SequenceShard):
        if target.spec.dim == spec.dim and target.spec.same_positions(spec):
            return target.local
        target = target.full()
    if target.dim() <= spec.dim or target.shape[spec.dim] != spec.size:
        raise NotAligned
    return spec.take_local(target, op.context.rank)


def _count(
    op: ShardedCall, logits: SequenceShard, target: Tensor, options: dict[str, Any]
) -> Tensor:
    """What a mean over tokens divides by, over all ranks: the weight of those that count."""
    if target.is_floating_point():
        return _all(op, torch.tensor(target.numel() / target.shape[1], device=target.device))
    counts = target != options.get("ignore_index", -100)
    weight = options.get("weight")
    if weight is None:
        return _all(op, counts.sum().to(torch.float32))
    return _all(op, weight[target.where(counts, 0)].where(counts, 0).sum())


def _all(op: ShardedCall, number: Tensor) -> Tensor:
    total = number.detach().clone()
    op.context.group.all_reduce(total).wait()
    return total


def _pointwise(op: ShardedCall) -> Any:
    """Losses that compare elements: without a reduction they are elementwise."""
    names = ("input", "target")
    given = dict(zip(names, op.args, strict=False)) | op.kwargs
    reduction = given.pop("reduction", "mean")
    is_odd = len(op.args) > 2 or any(given.get(name) is not None for name in _LEGACY)
    if is_odd or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    if len({_shape(given[name]) for name in names}) > 1:
        return NotImplemented
    alignment = SequenceAlignment(op.leader)
    try:
        loss = op.function(**alignment.locals(given), reduction="none")
    except NotAligned:
        return NotImplemented
    if reduction == "none":
        return alignment.wrap(loss)
    total = sum_over_ranks(loss.sum(), op.context.group)
    return total if reduction == "sum" else total / _shape(given["input"]).numel()


def _shape(tensor: Tensor) -> torch.Size:
    return tensor.full_shape if isinstance(tensor, SequenceShard) else tensor.shape


_COMMON = ["input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"]
_CLASSIFIED = {"cross_entropy": [*_COMMON, "label_smoothing"], "nll_loss": _COMMON}
_POINTWISE = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div"
)
LOSSES: dict[str, Callable[[ShardedCall], Any]] = {
    **dict.fromkeys(_CLASSIFIED, _classified),
    **dict.fromkeys(_POINTWISE.split(), _pointwise),
}
