"""What a step returns to when a worker of an elastic run is lost.

    localsgd(every=4)     step 8: average      9   10   11      worker 2 is lost
                          the others return to step 8 and do 9, 10 and 11 again, without it

What worker 2 has learned in steps 9 to 11 is lost with its weights, so all samples of these steps
have to be trained again. Where weights are updated after all communication (ddp) there is nothing
to undo but gradients and buffers.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from shoal.train.step import Step

OptimizerValues = dict[Tensor, dict[str, Any]]  # by parameter


class RollbackPoint:
    """A copy of the state of a step, taken when all replicas have agreed. It is reused."""

    def __init__(self, step: Step):
        self.steps = step.steps
        self._step = step
        self.buffers: list[Tensor] = []
        self._weights: Tensor | None = None
        self._optimizer: OptimizerValues = {}
        self._settings: list[dict[str, Any]] = []
        self._updates = 0

    def take(self) -> None:
        """Return to the present state, from now on."""
        step = self._step
        self.steps = step.steps
        self.buffers = [buffer.clone() for buffer in step.model.buffers()]
        if not step.sync.undo_steps:
            return
        optimizer = step.update.optimizer
        self._weights = _copied(step.flat.data, self._weights)
        self._optimizer = _copied_values(optimizer.state, self._optimizer)
        self._settings = [copy.copy(group) for group in optimizer.param_groups]
        self._updates = step.update.steps

    def restore(self) -> None:
        """Undo what was done since `take`."""
        step = self._step
        step.abandon(self.buffers)
        if self._weights is None:
            return
        with torch.no_grad():
            step.flat.data.copy_(self._weights)
        optimizer = step.update.optimizer
        optimizer.state.clear()
        optimizer.state.update(_copied_values(self._optimizer, {}))
        for group, settings in zip(optimizer.param_groups, self._settings, strict=True):
            group.update(settings)
        step.update.steps = self._updates
        step.steps = self.steps
        step.sync.undo()


def _copied_values(values: Any, into: OptimizerValues) -> OptimizerValues:
    return {
        p: {key: _copied(value, into.get(p, {}).get(key)) for key, value in state.items()}
        for p, state in values.items()
    }


def _copied(value: Any, into: Any) -> Any:
    """A copy, in the memory of an earlier one if that is as large."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if isinstance(into, Tensor) and (into.shape, into.dtype) == (value.shape, value.dtype):
        return into.copy_(value)
    return value.detach().clone()
