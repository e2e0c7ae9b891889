"""Sums and means over positions, and losses."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.replica.context.sequence_shard import SequenceAlignment, SequenceShard, of_sequence
from shoal.replica.context.views import Along
from shoal.replica.split.mapping import sum_over_ranks
from shoal.replica.split.sharded_tensor import NotAligned, Rule, ShardedCall

_LEGACY = {"size_average", "reduce"}
_COMMON = ["input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"]
_CLASSIFIED = {"cross_entropy": [*_COMMON, "label_smoothing"], "nll_loss": _COMMON}
_POINTWISE = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div"
)


def _sum(op: ShardedCall, x: SequenceShard) -> Any:
    """`sum` and `mean`, over the positions of all ranks where the call is along them."""
    dim = op.argument(1, "dim", op.kwargs.get("axis"))
    dims = [dim] if isinstance(dim, int) else dim or range(x.dim())
    dims = [d % x.dim() for d in dims]
    if x.spec.dim not in dims:
        return Along(1)(op)
    if op.argument(3, "dtype") is not None:
        return NotImplemented
    # it may be larger than a half-precision number can be
    wide = x.local.float() if x.dtype in (torch.float16, torch.bfloat16) else x.local
    local = wide.sum(dims, keepdim=bool(op.argument(2, "keepdim", False)))
    total = sum_over_ranks(local, op.context.group)
    if op.name == "mean":
        total = total / math.prod(x.full_shape[d] for d in dims)
    return total.to(x.dtype) if x.is_floating_point() else total


def _classified(op: ShardedCall) -> Any:
    """`cross_entropy` and `nll_loss`: classes are dimension 1, or 0 of a single sample."""
    given = dict(zip(_CLASSIFIED[op.name], op.args, strict=False)) | op.kwargs
    logits = given["input"]
    reduction = given.get("reduction", "mean")
    is_odd = any(given.get(name) is not None for name in _LEGACY)
    if is_odd or not isinstance(logits, SequenceShard) or logits.dim() < 2 or logits.spec.dim == 1:
        return NotImplemented
    if isinstance(given.get("weight"), SequenceShard) or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    wanted = _target(op, logits, given["target"])
    names = ("weight", "ignore_index", "label_smoothing")
    options = {name: given[name] for name in names if given.get(name) is not None}
    function = F.cross_entropy if op.name == "cross_entropy" else F.nll_loss
    if reduction == "none":
        loss = function(logits.local, wanted, reduction="none", **options)
        return logits.wrap_along(loss, [1])
    here = function(logits.local, wanted, reduction="sum", **options)
    total = sum_over_ranks(here, op.context.group)
    return total / _count(op, wanted, options) if reduction == "mean" else total


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


def _count(op: ShardedCall, target: Tensor, options: dict[str, Any]) -> Tensor:
    """What a mean over tokens divides by, over all ranks: the weight of those that count."""
    counts = target != options.get("ignore_index", -100)
    weight = options.get("weight")
    if target.is_floating_point():
        number = torch.tensor(target.numel() / target.shape[1], device=target.device)
    elif weight is None:
        number = counts.sum().to(torch.float32)
    else:
        number = weight[target.where(counts, 0)].where(counts, 0).sum()
    total = number.detach().clone()
    op.context.group.all_reduce(total).wait()
    return total


def _pointwise(op: ShardedCall) -> Any:
    """Losses that compare elements: without a reduction they are elementwise."""
    names = ("input", "target")
    given = dict(zip(names, op.args, strict=False)) | op.kwargs
    reduction = given.pop("reduction", "mean")
    is_odd = len(op.args) > 2 or any(given.get(name) is not None for name in _LEGACY)
    shapes = [t.full_shape if isinstance(t, SequenceShard) else t.shape
              for t in (given[name] for name in names)]  # fmt: skip
    if is_odd or reduction not in ("none", "mean", "sum") or shapes[0] != shapes[1]:
        return NotImplemented
    alignment = SequenceAlignment(op.leader)
    loss = op.function(**alignment.locals(given), reduction="none")
    if reduction == "none":
        return alignment.wrap(loss)
    total = sum_over_ranks(loss.sum(), op.context.group)
    return total if reduction == "sum" else total / shapes[0].numel()


RULES: dict[str, Rule] = {
    **dict.fromkeys(["sum", "mean"], of_sequence(_sum)),
    **dict.fromkeys(_CLASSIFIED, _classified),
    **dict.fromkeys(_POINTWISE.split(), _pointwise),
}
