"""Logits of which every rank of a tp group has some classes.

`F.cross_entropy` of them costs three numbers a row between ranks instead of all the classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.comm.group import Group, Op
from shoal.replica.tensor.mappings import gather, scatter
from shoal.replica.tensor.shard_spec import Share
from shoal.replica.tensor.sharded_tensor import SplitTensor, reshaped


class SplitLogits(SplitTensor):
    """The last dimension is split."""

    @classmethod
    def of(cls, local: Tensor, share: Share, group: Group) -> SplitLogits:
        """`share` deals out the classes; its dimension is the last one, whichever that is."""
        found: SplitLogits = local.as_subclass(cls)
        found.group = group
        found.share = share
        return found

    def join(self) -> Tensor:
        local = self.local
        return gather(local, Share(local.dim() - 1, self.share.ranges), self.group)

    def part_of(self, whole: Tensor) -> Tensor:
        return scatter(whole, Share(whole.dim() - 1, self.share.ranges), self.group)


def _shape(logits: SplitLogits) -> torch.Size:
    local = logits.local.shape
    return torch.Size([*local[:-1], logits.share.size])


def _size(logits: SplitLogits, dim: int | None = None) -> Any:
    return _shape(logits) if dim is None else _shape(logits)[dim]


def _flatten(logits: SplitLogits, start_dim: int = 0, end_dim: int = -1) -> Tensor | None:
    """Stays split as long as the classes are a dimension of their own."""
    dims = logits.local.dim()
    if end_dim % dims == dims - 1 and start_dim % dims != dims - 1:
        return None
    return _like(logits, logits.local.flatten(start_dim, end_dim))


def _reshape(logits: SplitLogits, *shape: Any) -> Tensor | None:
    whole = reshaped(_shape(logits), shape)
    if not whole or whole[-1] != logits.share.size:
        return None
    return _like(logits, logits.local.reshape(*whole[:-1], logits.local.shape[-1]))


def _float(logits: SplitLogits) -> Tensor:
    return _like(logits, logits.local.float())


def _like(logits: SplitLogits, local: Tensor) -> Tensor:
    return SplitLogits.of(local, logits.share, logits.group)


def _cross_entropy(
    logits: SplitLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    if not isinstance(logits, SplitLogits):  # the target is
        return None
    is_plain = weight is None and size_average is None and reduce is None and not label_smoothing
    local = logits.local
    if not is_plain or local.dim() != 2 or target.is_floating_point() or target.dim() != 1:
        return None
    counted = target != ignore_index
    if target.device.type == "cpu":
        wrong = counted & ((target < 0) | (target >= logits.share.size))
        if wrong.any():
            raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        local, target, counted, logits.share.ranges[logits.group.rank][0], logits.group
    )
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


class _CrossEntropy(torch.autograd.Function):
    """The loss of every row: log of the sum of exponentials, less the target's logit."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, target: Tensor, counted: Tensor, mine: range, group: Group
    ) -> Tensor:
        ctx.dtype = local.dtype
        x = local.detach().float() if local.dtype in (torch.float16, torch.bfloat16) else local
        x = x.detach()
        highest = x.amax(1)
        group.all_reduce(highest, Op.MAX).wait()
        x = x - highest[:, None]
        here = counted & (target >= mine.start) & (target < mine.stop)
        place = (target - mine.start).where(here, 0)
        wanted = x.gather(1, place[:, None])[:, 0].where(here, 0)
        power = x.exp_()
        sums = torch.stack([power.sum(1), wanted])
        group.all_reduce(sums).wait()
        ctx.save_for_backward(power / sums[0][:, None], place, here, counted)
        return (sums[0].log() - sums[1]).where(counted, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        share, place, here, counted = ctx.saved_tensors
        grad = share.clone()
        grad.scatter_add_(1, place[:, None], -here.to(grad.dtype)[:, None])
        grad *= (grads[0] * counted)[:, None]
        return grad.to(ctx.dtype), None, None, None, None


SplitLogits.known = {
    Tensor.shape.__get__: _shape,  # type: ignore[attr-defined]
    Tensor.size: _size,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    Tensor.float: _float,
    F.cross_entropy: _cross_entropy,
}
