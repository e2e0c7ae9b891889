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

from shoal.replica.flat_params import FlatParams
from shoal.replica.grad_buckets import OnBucket
from shoal.schedules.pipelines import Action, ActionKind

# the gradients of the weights are complete afterwards
_ENDS_BACKWARD = (ActionKind.BACKWARD, ActionKind.WEIGHT)


class Accumulation:
    """`reduce_tied` adds up the gradients of weights that several stages of a pipeline hold."""

    def __init__(self, flat: FlatParams, reduce_tied: Callable[[], None] | None = None):
        self._flat = flat
        self._reduce_tied = reduce_tied

    def begin(self, on_bucket: OnBucket, microbatches: int) -> None:
        self._on_bucket = on_bucket
        self._microbatches = microbatches

    def add_loss(self, microbatch: int, loss: Tensor) -> None:
        raise NotImplementedError

    def before(self, action: Action, is_last: bool) -> None:
        return None

    def after(self, action: Action, is_last: bool) -> None:
        raise NotImplementedError

    def finish(self) -> Tensor:
        raise NotImplementedError

    def _arm(self) -> None:
        self._flat.grads.arm(self._on_bucket)

    def _flush(self) -> None:
        if self._reduce_tied is not None:
            self._reduce_tied()
        self._flat.grads.flush()
        self._flat.reshard()

    def _zero(self) -> Tensor:
        return torch.zeros((), device=self._flat.device)


class StepAccumulation(Accumulation):
    """Stages of a pipeline other than the last have no loss: theirs is 0."""

    _total: Tensor | None

    def begin(self, on_bucket: OnBucket, microbatches: int) -> None:
        super().begin(on_bucket, microbatches)
        self._total = None
        if self._reduce_tied is not None:
            self.add_loss(0, self._zero())

    def add_loss(self, microbatch: int, loss: Tensor) -> None:
        self._total = loss if self._total is None else self._total + loss
        self._flat.grads.record_loss(self._total)

    def before(self, action: Action, is_last: bool) -> None:
        if self._reports(action, is_last):
            self._arm()

    def after(self, action: Action, is_last: bool) -> None:
        if self._reports(action, is_last):
            self._flush()

    def finish(self) -> Tensor:
        assert self._total is not None
        return self._total

    def _reports(self, action: Action, is_last: bool) -> bool:
        return is_last


class NoAccumulation(StepAccumulation):
    """Every micro-batch is reduced by itself."""

    def add_loss(self, microbatch: int, loss: Tensor) -> None:
        self._total = None
        super().add_loss(microbatch, loss)

    def _reports(self, action: Action, is_last: bool) -> bool:
        return action.kind in _ENDS_BACKWARD


class OrderedAccumulation(Accumulation):
    """Gradients are kept apart by micro-batch and reported when all of them are there."""

    def begin(self, on_bucket: OnBucket, microbatches: int) -> None:
        super().begin(on_bucket, microbatches)
        self._losses: dict[int, Tensor] = {}
        self.gradients: dict[int, dict[nn.Parameter, Tensor]] = {}

    def add_loss(self, microbatch: int, loss: Tensor) -> None:
        self._losses[microbatch] = loss

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
        loss = self._zero()
        for m in range(self._microbatches):
            for p, grad in self.gradients.pop(m, {}).items():
                p.grad = grad
            loss = self._losses.get(m, self._zero())
            self._flat.grads.record_loss(loss)
            self._arm()
            self._flush()
        return loss
