"""Sharded activations of tp: rows of a sequence between layers, and logits of some classes.

    RowLinear ─ reduce-scatter ─ + bias ─ dropout ─ + residual ─ norm ─ all-gather ─ ColumnLinear
                └──────────────── each rank: its positions ─────────┘

Positions of a (batch, time, features) tensor are its batch * time rows, sharded evenly, whatever
their number. Norms, dropout, sums and elementwise functions are computed on the rows; other
operations gather them first. A parameter that is used on rows has the sum of the ranks' gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from shoal.comm.group import Group, Op
from shoal.replica.microbatch_context import TensorParallelRng, as_autocast_does
from shoal.replica.split.mapping import (
    ShardSpec,
    copy,
    gather,
    gather_sequence,
    reduce_scatter,
    scatter,
)
from shoal.replica.split.sharded_tensor import (
    ELEMENTWISE,
    METADATA,
    NotAligned,
    ShardedActivation,
    ShardedCall,
    elementwise,
    reshaped,
)
from shoal.runtime.pytree import Tree, is_marked, map_leaves, map_tensors

_MARK = "rows of a sequence"


class SequenceParallelTensor(ShardedActivation):
    """`local` is (rows, features); `leading` are the dimensions before the features."""

    leading: torch.Size

    @classmethod
    def of(
        cls, local: Tensor, leading: torch.Size, group: Group, rng: TensorParallelRng
    ) -> SequenceParallelTensor:
        rows: SequenceParallelTensor = local.as_subclass(cls)
        rows.leading = leading
        rows.rng = rng
        rows.group = group
        rows.spec = ShardSpec.even(0, math.prod(leading), group.size)
        return rows

    @classmethod
    def summed(
        cls, partial: Tensor, group: Group, rng: TensorParallelRng
    ) -> SequenceParallelTensor:
        """The sum over ranks of `partial`, (…, features)."""
        rows = partial.flatten(0, -2)
        spec = ShardSpec.even(0, len(rows), group.size)
        return cls.of(reduce_scatter(rows, spec, group), partial.shape[:-1], group, rng)

    def like(self, local: Tensor) -> SequenceParallelTensor:
        return SequenceParallelTensor.of(local, self.leading, self.group, self.rng)

    @property
    def full_shape(self) -> torch.Size:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Size([*self.leading, self.as_subclass(Tensor).shape[-1]])

    def gather_full(self) -> Tensor:
        return self._shaped(gather(self.local, self.spec, self.group))

    def packed(self) -> Any:
        return (_MARK, self.local, list(self.leading))

    def shard_of(self, full: Tensor) -> Tensor:
        return scatter(full.flatten(0, -2), self.spec, self.group)

    def gather_sequence(self) -> Tensor:
        """All positions, for computations that differ from rank to rank."""
        return self._shaped(gather_sequence(self.local, self.spec, self.group))

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A column-parallel layer. Its input is not kept: backward gathers it again."""
        local = as_autocast_does(self.local)  # before it is gathered, which halves the bytes
        rows = gather_sequence(local, self.spec, self.group)
        with _saving_local(local.detach(), rows, self.spec, self.group):
            out = F.linear(rows, weight, bias)
        return self._shaped(out)

    def _shaped(self, rows: Tensor) -> Tensor:
        return rows.view(*self.leading, rows.shape[-1])

    def align(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, SequenceParallelTensor):
            if tensor.leading != self.leading:
                raise NotAligned
            return tensor.local
        if tensor.dim() <= 1:
            return copy(tensor, self.group)
        try:
            return self.shard_of(tensor.expand(*self.leading, tensor.shape[-1]))
        except RuntimeError:  # it has other dimensions
            raise NotAligned from None


@contextmanager
def _saving_local(local: Tensor, rows: Tensor, spec: ShardSpec, group: Group) -> Iterator[None]:
    """What autograd saves of `rows` is `local`, of which all ranks have one; they gather again."""
    outer_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack, unpack = outer_hooks or (lambda x: x, lambda x: x)
    address = rows.untyped_storage().data_ptr()

    def save(tensor: Tensor) -> tuple[bool, Any]:
        is_rows = tensor.untyped_storage().data_ptr() == address and tensor.shape == rows.shape
        return is_rows, pack(local if is_rows else tensor)

    def load(saved: tuple[bool, Any]) -> Tensor:
        value: Tensor = unpack(saved[1])
        return spec.all_gather(value, group) if saved[0] else value

    with saved_tensors_hooks(save, load):
        yield


# ------------------------------------------------------------------ computed on the rows


def _elementwise(call: ShardedCall) -> Any:
    """`x += y` only of rows that were not modified through the full tensor before."""
    return NotImplemented if call.is_in_place and call.leader.is_modified else elementwise(call)


def _reshape(call: ShardedCall) -> Any:
    """Stays sharded as long as the features, or the classes, are a dimension of their own."""
    x = call.args[0]
    if not isinstance(x, ShardedActivation) or isinstance(call.argument(1, ""), torch.dtype):
        return NotImplemented
    full = reshaped(call.name, x.full_shape, call.args[1:], call.kwargs)
    if not full or full[-1] != x.full_shape[-1]:
        return NotImplemented
    if isinstance(x, VocabParallelLogits):
        return x.like(x.local.reshape(*full[:-1], x.local.shape[-1]))
    if len(full) == 1:
        return NotImplemented
    return SequenceParallelTensor.of(x.local, full[:-1], x.group, x.rng)


def _norm(call: ShardedCall) -> Any:
    """Of the features; weights have the gradients of all rows."""
    x = call.args[0]
    if not isinstance(x, SequenceParallelTensor):
        return NotImplemented
    if list(call.argument(1, "normalized_shape")) != [x.local.shape[-1]]:
        return NotImplemented
    args, kwargs = map_tensors(lambda p: copy(p, x.group), (call.args[1:], call.kwargs))
    return x.like(call.function(x.local, *args, **kwargs))


SequenceParallelTensor.rules = {
    **METADATA,
    **{name: _elementwise if rule is elementwise else rule for name, rule in ELEMENTWISE.items()},
    **dict.fromkeys(["view", "reshape"], _reshape),
    **dict.fromkeys(["layer_norm", "rms_norm"], _norm),
}


# ------------------------------------------------------------------ between stages


def unpack(tree: Tree, group: Group, rng: TensorParallelRng) -> Tree:
    """What `pack` has made of rows."""
    return map_leaves(
        partial(is_marked, mark=_MARK),
        lambda leaf: SequenceParallelTensor.of(leaf[1], torch.Size(leaf[2]), group, rng),
        tree,
    )


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


def _cross_entropy(
    logits: VocabParallelLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if not isinstance(logits, VocabParallelLogits):  # the target is
        return NotImplemented
    is_plain = weight is None and size_average is None and reduce is None and not label_smoothing
    local = logits.local
    if not is_plain or local.dim() != 2 or target.is_floating_point() or target.dim() != 1:
        return NotImplemented
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
    "cross_entropy": lambda call: _cross_entropy(*call.args, **call.kwargs),
}
