"""Optimizers that the job does not know, on parameters that it synchronizes.

Such an optimizer would update one worker's weights alone, or with a part of the gradient.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal.errors import BadInput
from shoal.train.step import Step


class OtherOptimizers:
    """Until `end`: refuses a step of an optimizer that has parameters of `steps`, if not theirs.

    `own` are optimizers of the script that the job knows. Those that one of them wraps, as its
    attributes, belong to it.
    """

    def __init__(
        self, steps: Sequence[Step], own: Callable[[], Iterable[torch.optim.Optimizer]]
    ) -> None:
        self._steps = steps
        self._own = own
        guard = weakref.ref(self)
        with _guards_lock:
            _guards.append(guard)
        self.end = weakref.finalize(self, _forget, guard)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `BadInput` if it updates what it must not."""
        if self._knows(optimizer):
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for step in self._steps:
            for name, p in step.flat.named:
                if id(p) in held and not _is_known_elsewhere(optimizer):
                    raise BadInput(
                        f"an optimizer ({type(optimizer).__name__}) that the job does not know "
                        f"updates {name}, which job.setup or job.step manages under {step.term}: "
                        "pass it to job.setup with the model, and call step() of what that returns"
                    )

    def _knows(self, optimizer: torch.optim.Optimizer) -> bool:
        known = [*self._own(), *(step.update.optimizer for step in self._steps)]
        return any(o is optimizer for o in known) or any(
            value is optimizer for o in known for value in vars(o).values()
        )


_guards: list[weakref.ref[OtherOptimizers]] = []
_guards_lock = threading.RLock()  # the garbage collector may call `_forget` while it is held


def _forget(guard: weakref.ref[OtherOptimizers]) -> None:
    with _guards_lock:
        _guards.remove(guard)


def _alive() -> list[OtherOptimizers]:
    with _guards_lock:
        found = [guard() for guard in _guards]
    return [guard for guard in found if guard is not None]


def _is_known_elsewhere(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a later job trains the same model by it."""
    return any(guard._knows(optimizer) for guard in _alive())


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for guard in _alive():
        guard.check(optimizer)


# once, before anything steps: torch iterates over its hooks while ranks that are threads train
register_optimizer_step_pre_hook(_before_step)
