"""Optimizers that the job does not know.

On parameters that it synchronizes, such an optimizer would update one worker's weights alone, or
with a part of the gradient. On other parameters, from one batch of `job.batches` to the next, it
would train a model of this worker's own on this worker's rows.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
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
        self._batches = 0
        self._thread = 0  # that gets the batches; ranks may be threads
        self._stepped: dict[int, tuple[torch.optim.Optimizer, int]] = {}  # and in which batch
        self.communicates = False  # the script exchanges tensors itself
        guard = weakref.ref(self)
        with _guards_lock:
            _guards.append(guard)
        self.end = weakref.finalize(self, _forget, guard)

    def deliver(self) -> None:
        """This worker gets its rows of another batch, of which others get other rows."""
        self._batches += 1
        self._thread = threading.get_ident()

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
        self._check_alone(optimizer)

    def _check_alone(self, optimizer: torch.optim.Optimizer) -> None:
        """One that lives for a batch, such as that of an adversarial example, may step."""
        if not self._batches or threading.get_ident() != self._thread or self.communicates:
            return
        if self._steps:  # it trains what it was given; syncs have optimizers of their own
            return
        _, first = self._stepped.setdefault(id(optimizer), (optimizer, self._batches))
        is_model = any(
            isinstance(p, nn.Parameter) for g in optimizer.param_groups for p in g["params"]
        )
        if first < self._batches and is_model and not _is_parallel():
            raise BadInput(
                f"{type(optimizer).__name__} trains parameters that neither job.setup nor job.step "
                "was given, on this worker's rows of job.batches, so every worker would train a "
                "model of its own: model, optimizer = job.setup(model, optimizer), and "
                "job.backward(loss) instead of loss.backward()"
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


def _is_parallel() -> bool:
    """Whether the script has wrapped a model that reduces gradients itself."""
    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel")
    return any(
        type(found).__name__ in wrappers or type(found).__name__.startswith("FSDP")
        for found in gc.get_objects()
    )


def _is_known_elsewhere(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a later job trains the same model by it."""
    return any(guard._knows(optimizer) for guard in _alive())


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for guard in _alive():
        guard.check(optimizer)


# once, before anything steps: torch iterates over its hooks while ranks that are threads train
register_optimizer_step_pre_hook(_before_step)
