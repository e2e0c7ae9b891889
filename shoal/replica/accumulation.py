"""Gradient accumulation: which micro-batches are added up before gradients are reduced.

    StepAccumulation      all of a step, reported during the last backward
    NoAccumulation        each micro-batch by itself, reported during its backward
    OrderedAccumulation   each micro-batch by itself, reported in order at the end of the step,
                          for pipelines, where the backwards of micro-batches overlap

Losses are added up alike, and travel in the header of the gradient buckets. The engine calls
`begin`, `add_loss` before the backward of a micro-batch, `before` and `after` each action, and
`finish`, which returns the loss of the step, or of the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shoal.replica.flat.grad_buckets import OnBucket
from shoal.replica.flat.params import FlatParams
from shoal.schedules.pipelines.actions import Action, ActionKind

# the gradients of the weights are complete afterwards
_ENDS_BACKWARD = (ActionKind.BACKWARD, ActionKind.WEIGHT)


class StepAccumulation:
    """`reduce_tied` adds up the gradients of weights that several stages hold.

    Stages other than the last have no loss: with `starts_at_zero` theirs is 0.
    """

    def __init__(
        self,
        flat: FlatParams,
        reduce_tied: Callable[[], None] | None = None,
        starts_at_zero: bool = False,
    ):
        self._flat = flat
        self._reduce_tied = reduce_tied
        self._starts_at_zero = starts_at_zero

    def begin(self, on_bucket: OnBucket, microbatches: int) -> None:
        self._on_bucket = on_bucket
        self._total: Tensor | None = None
        if self._starts_at_zero:
            self._set_total(torch.zeros((), device=self._flat.device))

    def add_loss(self, microbatch: int, loss: Tensor) -> None:
        self._set_total(loss if self._total is None else self._total + loss)

    def before(self, action: Action, is_last: bool) -> None:
        if is_last:
            self._flat.grads.arm(self._on_bucket)

    def after(self, action: Action, is_last: bool) -> None:
        if is_last:
            if self._reduce_tied is not None:
                self._reduce_tied()
            self._flat.grads.flush()
            self._flat.reshard()

    def finish(self) -> Tensor:
        assert self._total is not None
        return self._total

    def _set_total(self, total: Tensor) -> None:
        self._total = total
        self._flat.grads.record_loss(total)


class NoAccumulation:
    """Every micro-batch is reduced by itself."""

    def __init__(self, flat: FlatParams):
        self._flat = flat

    def begin(self, on_bucket: OnBucket, microbatches: int) -> None:
        self._on_bucket = on_bucket

    def add_loss(self, microbatch: int, loss: Tensor) -> None:
        self._loss = loss
        self._flat.grads.record_loss(loss)

    def before(self, action: Action, is_last: bool) -> None:
        if action.kind in _ENDS_BACKWARD:
            self._flat.grads.arm(self._on_bucket)

    def after(self, action: Action, is_last: bool) -> None:
        if action.kind in _ENDS_BACKWARD:
            self._flat.grads.flush()
            self._flat.reshard()

    def finish(self) -> Tensor:
        return self._loss


class OrderedAccumulation:
    """Gradients are kept apart by micro-batch and reported when all of them are there."""

    def __init__(self, flat: FlatParams, reduce_tied: Callable[[], None]):
        self._flat = flat
        self._reduce_tied = reduce_tied

    def begin(self, on_bucket: OnBucket, microbatches: int) -> None:
        self._on_bucket = on_bucket
        self._microbatches = microbatches
        self._losses: dict[int, Tensor] = {}
        self.gradients: dict[int, dict[nn.Parameter, Tensor]] = {}

    def add_loss(self, microbatch: int, loss: Tensor) -> None:
        self._losses[microbatch] = loss

    def before(self, action: Action, is_last: bool) -> None:
        return None

    def after(self, action: Action, is_last: bool) -> None:
        """Move what this action added from the parameters to its micro-batch."""
        if action.kind not in _ENDS_BACKWARD:
            return
        grads = self.gradients.setdefault(action.microbatch, {})
        for p in self._flat.params:
            if p.grad is not None:
                grads[p] = grads[p] + p.grad if p in grads else p.grad
                p.grad = None

    def finish(self) -> Tensor:
        loss = torch.zeros((), device=self._flat.device)
        for m in range(self._microbatches):
            for p, grad in self.gradients.pop(m, {}).items():
                p.grad = grad
            loss = self._losses.get(m, torch.zeros((), device=self._flat.device))
            self._flat.grads.record_loss(loss)
            self._reduce_tied()
            self._flat.grads.arm(self._on_bucket)
            self._flat.grads.flush()
            self._flat.reshard()
        return loss


Accumulation = StepAccumulation | NoAccumulation | OrderedAccumulation
