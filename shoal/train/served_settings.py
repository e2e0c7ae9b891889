"""Settings of an optimizer that servers run: the learning rate follows the script's scheduler."""

from __future__ import annotations

from typing import Any

import torch

from shoal.errors import BadInput

_TOLERANCE = 1e-6  # of the factor between groups: schedulers compute it group by group


class ServedSettings:
    """What `optimizer` asks for now, compared with what the servers were given at the start.

    Servers get one learning rate a step, and parameter groups keep their ratios to it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._start = [self._settings(group) for group in optimizer.param_groups]
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._base = float(optimizer.defaults["lr"])
        if 0.0 in self._rates:
            raise BadInput(
                "servers keep the ratios of learning rates, and one is 0 at job.setup: make the "
                "scheduler after job.setup"
            )

    def learning_rate(self, step: int) -> float:
        """What the servers update with; BadInput for a change that they cannot follow."""
        groups = self._optimizer.param_groups
        if [self._settings(group) for group in groups] != self._start:
            raise self._refused("other settings than the learning rate changed")
        factors = [float(g["lr"]) / rate for g, rate in zip(groups, self._rates, strict=True)]
        if max(factors) - min(factors) > _TOLERANCE * max(map(abs, factors)):
            raise self._refused("the learning rates of parameter groups changed differently")
        return self._base * factors[0]

    def _settings(self, group: dict[str, Any]) -> dict[str, Any]:
        return {key: group[key] for key in self._optimizer.defaults if key in group and key != "lr"}

    def _refused(self, what: str) -> BadInput:
        kind = type(self._optimizer).__name__
        return BadInput(
            f"servers run {kind} with the settings of job.setup and one schedule of the learning "
            f"rate, and {what}: take ps without a relaxed rule, or ddp"
        )
