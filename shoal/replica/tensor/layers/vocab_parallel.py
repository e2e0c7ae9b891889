"""Vocab-parallel cross-entropy: every rank of a tp group has the logits of some classes.

`F.cross_entropy` of them exchanges three numbers per row between ranks instead of all classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.comm.group import Group, Op
from shoal.replica.tensor.activations.shard_spec import ShardSpec
from shoal.replica.tensor.activations.sharded_tensor import ShardedActivation, reshaped
from shoal.replica.tensor.mappings import gather, scatter


class VocabParallelLogits(ShardedActivation):
    """The last dimension is sharded."""

    @classmethod
    def of(cls, local: Tensor, spec: ShardSpec, group: Group) -> VocabParallelLogits:
        """`spec` shards the classes; its dimension is the last one, whichever that is."""
        logits: VocabParallelLogits = local.as_subclass(cls)
        logits.group = group
        logits.spec = spec
        return logits

    def gather_full(self) -> Tensor:
        local = self.local
        return gather(local, ShardSpec(local.dim() - 1, self.spec.ranges), self.group)

    def shard_of(self, full: Tensor) -> Tensor:
        return scatter(full, ShardSpec(full.dim() - 1, self.spec.ranges), self.group)


def _shape(logits: VocabParallelLogits) -> torch.Size:
    local = logits.local.shape
    return torch.Size([*local[:-1], logits.spec.size])


def _size(logits: VocabParallelLogits, dim: int | None = None) -> Any:
    return _shape(logits) if dim is None else _shape(logits)[dim]


def _flatten(logits: VocabParallelLogits, start_dim: int = 0, end_dim: int = -1) -> Tensor | None:
    """Stays sharded as long as the classes are a dimension of their own."""
    dims = logits.local.dim()
    if end_dim % dims == dims - 1 and start_dim % dims != dims - 1:
        return None
    return _like(logits, logits.local.flatten(start_dim, end_dim))


def _reshape(logits: VocabParallelLogits, *shape: Any) -> Tensor | None:
    full = reshaped(_shape(logits), shape)
    if not full or full[-1] != logits.spec.size:
        return None
    return _like(logits, logits.local.reshape(*full[:-1], logits.local.shape[-1]))


def _float(logits: VocabParallelLogits) -> Tensor:
    return _like(logits, logits.local.float())


def _like(logits: VocabParallelLogits, local: Tensor) -> Tensor:
    return VocabParallelLogits.of(local, logits.spec, logits.group)


def _cross_entropy(
    logits: VocabParallelLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    if not isinstance(logits, VocabParallelLogits):  # the target is
        return None
    is_plain = weight is None and size_average is None and reduce is None and not label_smoothing
    local = logits.local
    if not is_plain or local.dim() != 2 or target.is_floating_point() or target.dim() != 1:
        return None
    counted = target != ignore_index
    if target.device.type == "cpu":
        wrong = counted & ((target < 0) | (target >= logits.spec.size))
        if wrong.any():
            raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        local, target, counted, logits.spec.ranges[logits.group.rank][0], logits.group
    )
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


class _CrossEntropy(torch.autograd.Function):
    """The loss of every row: log of the sum of exponentials, less the target's logit."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, target: Tensor, counted: Tensor, classes: range, group: Group
    ) -> Tensor:
        ctx.dtype = local.dtype
        x = local.detach().float() if local.dtype in (torch.float16, torch.bfloat16) else local
        x = x.detach()
        highest = x.amax(1)
        group.all_reduce(highest, Op.MAX).wait()
        x = x - highest[:, None]
        is_local = counted & (target >= classes.start) & (target < classes.stop)
        index = (target - classes.start).where(is_local, 0)
        target_logit = x.gather(1, index[:, None])[:, 0].where(is_local, 0)
        power = x.exp_()
        sums = torch.stack([power.sum(1), target_logit])
        group.all_reduce(sums).wait()
        ctx.save_for_backward(power / sums[0][:, None], index, is_local, counted)
        return (sums[0].log() - sums[1]).where(counted, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        softmax, index, is_local, counted = ctx.saved_tensors
        grad = softmax.clone()
        grad.scatter_add_(1, index[:, None], -is_local.to(grad.dtype)[:, None])
        grad *= (grads[0] * counted)[:, None]
        return grad.to(ctx.dtype), None, None, None, None


VocabParallelLogits.sharded_ops = {
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
