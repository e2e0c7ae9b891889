"""Gradient accumulation: which micro-batches are added up before gradients are reduced.

    StepAccumulation      all of a step, reported during the last backward
                          every_microbatch: each by itself, reported during its backward
    OrderedAccumulation   each micro-batch by itself, reported in order at the end of the step,
                          for pipelines, where the backwards of micro-batches overlap

Losses are added up alike, and travel in the header of the gradient buckets. The engine calls
`begin`, `add_loss` before the backward of a micro-batch, `before` and `after` each action, and
`finish`, which returns the loss of the step, or of the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.replica.flat_params import FlatParams
from shoal.replica.grad_buckets import OnBucket
from shoal.schedules.pipelines import Action, ActionKind

# the gradients of the weights are complete afterwards
_ENDS_BACKWARD = (ActionKind.BACKWARD, ActionKind.WEIGHT)


@dataclass(eq=False)
class StepAccumulation:
    """`reduce_tied` adds up the gradients of weights that several stages of a pipeline hold.

    Stages of a pipeline other than the last have no loss: theirs is 0.
    """

    flat: FlatParams
    reduce_tied: Callable[[], None] | None = None
    every_microbatch: bool = False

    def begin(self, on_bucket: OnBucket, microbatches: int) -> None:
        self._on_bucket = on_bucket
        self._total: Tensor | None = None
        if self.reduce_tied is not None:
            self.add_loss(0, torch.zeros((), device=self.flat.device))

    def add_loss(self, microbatch: int, loss: Tensor) -> None:
        if self._total is not None and not self.every_microbatch:
            loss = self._total + loss
        self._total = loss
        self.flat.grads.record_loss(loss)

    def before(self, action: Action, is_last: bool) -> None:
        if self._reports(action, is_last):
            self.flat.grads.arm(self._on_bucket)

    def after(self, action: Action, is_last: bool) -> None:
        if self._reports(action, is_last):
            self._flush()

    def finish(self) -> Tensor:
        assert self._total is not None
        return self._total

    def _reports(self, action: Action, is_last: bool) -> bool:
        return action.kind in _ENDS_BACKWARD if self.every_microbatch else is_last

    def _flush(self) -> None:
        if self.reduce_tied is not None:
            self.reduce_tied()
        self.flat.grads.flush()
        self.flat.reshard()


class OrderedAccumulation(StepAccumulation):
    """Gradients are kept apart by micro-batch and reported when all of them are there."""

    def begin(self, on_bucket: OnBucket, microbatches: int) -> None:
        self._on_bucket = on_bucket
        zero = torch.zeros((), device=self.flat.device)
        self._losses = dict.fromkeys(range(microbatches), zero)
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
        for p in self.flat.params:
            if p.grad is not None:
                grads[p] = grads[p] + p.grad if p in grads else p.grad
                p.grad = None

    def finish(self) -> Tensor:
        for m, loss in self._losses.items():
            for p, grad in self.gradients.pop(m, {}).items():
                p.grad = grad
            self.flat.grads.record_loss(loss)
            self.flat.grads.arm(self._on_bucket)
            self._flush()
        return loss
