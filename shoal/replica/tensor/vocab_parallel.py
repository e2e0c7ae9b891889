"""Vocab-parallel cross-entropy: every rank of a tp group has the logits of some classes.

`F.cross_entropy` of them exchanges three numbers per row between ranks instead of all classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.comm.group import Group, Op
from shoal.replica.split.sharded_tensor import METADATA, ShardedActivation, ShardedCall, reshaped
from shoal.replica.tensor.mappings import gather, scatter
from shoal.replica.tensor.shard_spec import ShardSpec


class VocabParallelLogits(ShardedActivation):
    """The last dimension is sharded."""

    @classmethod
    def of(cls, local: Tensor, spec: ShardSpec, group: Group) -> VocabParallelLogits:
        """`spec` shards the classes; its dimension is the last one, whichever that is."""
        logits: VocabParallelLogits = local.as_subclass(cls)
        logits.group = group
        logits.spec = spec
        return logits

    @property
    def full_shape(self) -> torch.Size:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Size([*self.as_subclass(Tensor).shape[:-1], self.spec.size])

    def like(self, local: Tensor) -> VocabParallelLogits:
        return VocabParallelLogits.of(local, self.spec, self.group)

    def gather_full(self) -> Tensor:
        local = self.local
        return gather(local, ShardSpec(local.dim() - 1, self.spec.ranges), self.group)

    def shard_of(self, full: Tensor) -> Tensor:
        return scatter(full, ShardSpec(full.dim() - 1, self.spec.ranges), self.group)


def _reshape(call: ShardedCall) -> Any:
    """Stays sharded as long as the classes are a dimension of their own."""
    logits = call.args[0]
    if isinstance(call.argument(1, ""), torch.dtype):
        return NotImplemented
    full = reshaped(call.name, logits.full_shape, call.args[1:], call.kwargs)
    if not full or full[-1] != logits.spec.size:
        return NotImplemented
    return logits.like(logits.local.reshape(*full[:-1], logits.local.shape[-1]))


def _loss(call: ShardedCall) -> Any:
    loss = _cross_entropy(*call.args, **call.kwargs)
    return NotImplemented if loss is None else loss


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


VocabParallelLogits.rules = {
    **METADATA,
    **dict.fromkeys(["view", "reshape", "flatten"], _reshape),
    "cross_entropy": _loss,
}
