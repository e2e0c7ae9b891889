"""A scheduler of torch.optim.lr_scheduler under `job.step`: settings that follow from the step.

A scheduler is a recursion, so the settings of a step are reached by as many calls of
`scheduler.step()`. After a checkpoint was loaded they are made again from the script's scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.errors import BadInput

SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]
_TRIED_STEPS = 100
_PARAMS = ("params", "param_names")


class Schedule:
    """The settings of an optimizer's parameter groups, step by step."""

    def __init__(
        self,
        factory: SchedulerFactory,
        optimizer: torch.optim.Optimizer,
        trial: torch.optim.Optimizer | None = None,
    ):
        """`trial` is an optimizer like it, to see whether the factory can be used."""
        self.optimizer = optimizer
        self._factory = factory
        self._initial = [_settings(group) for group in optimizer.param_groups]
        if trial is not None:
            check_scheduler(factory(trial) if callable(factory) else factory)
        self._scheduler: LRScheduler | None = None
        self._done = 0

    def advance(self, steps: int) -> None:
        """Give the optimizer the settings of the step that comes after so many."""
        if self._scheduler is None or self._done > steps:
            self._scheduler = self._start()
        while self._done < steps:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
            self._scheduler.step()
            self._done += 1

    def restart(self) -> None:
        """The optimizer was loaded from a checkpoint."""
        self._scheduler = None

    def common_lr(self, ratios: Sequence[float]) -> float:
        """The one learning rate of all groups, but for their ratios: what servers receive."""
        groups = self.optimizer.param_groups
        for group, initial in zip(groups, self._initial, strict=True):
            changed = [k for k, v in initial.items() if k != "lr" and group[k] != v]
            if changed:
                raise BadInput(
                    f"the scheduler changes {changed[0]} of the optimizer, which servers do not "
                    'receive in a step: use ps(update="worker")'
                )
        rates = [float(g["lr"]) / r for g, r in zip(groups, ratios, strict=True) if r]
        if any(abs(rate - rates[0]) > 1e-9 * abs(rates[0]) for rate in rates):
            raise BadInput(
                "the scheduler gives parameter groups schedules of their own, and servers receive "
                'one learning rate a step: use ps(update="worker")'
            )
        return rates[0] if rates else 0.0

    def check_for_servers(self, trial: torch.optim.Optimizer, ratios: Sequence[float]) -> None:
        """See `common_lr`: of the first steps, on an optimizer that trains nothing."""
        schedule = Schedule(self._factory, trial)
        for step in range(_TRIED_STEPS):
            try:
                schedule.advance(step)
            except ValueError:  # a schedule of fewer steps is over
                return
            schedule.common_lr(ratios)

    def _start(self) -> LRScheduler:
        for group, initial in zip(self.optimizer.param_groups, self._initial, strict=True):
            for key in [key for key in group if key not in initial and key not in _PARAMS]:
                del group[key]
            group.update(initial)
        self._done = 0
        return self._factory(self.optimizer)


def check_scheduler(scheduler: Any) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise BadInput(
            "ReduceLROnPlateau follows a metric, which job.step does not know: use it in a loop of "
            "your own (job.setup, job.backward)"
        )
    if not isinstance(scheduler, LRScheduler):
        raise BadInput(
            "scheduler has to be a function from an optimizer to a scheduler, such as "
            "lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)"
        )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _PARAMS}
