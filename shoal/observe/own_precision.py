"""A script that does not run in double precision: how small an error its own precision shows.

As in `double_check.py`, what an update adds to a parameter and the state of the optimizer are
compared, relative to their own size, after the first steps. The tolerance is measured: ten times
what one worker changes when the same samples are added up in another order and in other batch
shapes, of this tensor or of the median tensor, whichever is more. It is not below what a sum in
float32 may change, up to 3e-5. A tensor that another order changes by more than 1% is all
rounding, and is not judged here.

An error of a gradient shows in the optimizer's state, or in the update where there is none. So the
largest tolerance among parameters says what would not have been found.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shoal.observe.captured_run import CapturedRun, Difference, bound
from shoal.observe.double_check import LARGEST, MARGIN, relative

LARGEST_FLOOR = 3e-5
_OF_OPTIMIZER = " of the optimizer"


@dataclass(frozen=True)
class OwnCheck:
    """`least` is the parameter whose gradient may be the most wrong without being found."""

    tensors: list[Difference]
    least: Difference | None

    @property
    def ok(self) -> bool:
        return all(d.is_equal for d in self.tensors)

    @property
    def worst(self) -> Difference | None:
        return max(self.tensors, key=lambda d: d.excess, default=None)

    def to_json(self) -> dict[str, Any]:
        worst = self.worst
        least = self.least
        return {
            "ok": self.ok,
            "largest_relative_difference": worst and asdict(worst),
            "errors_found_above": least and least.tolerance,
            "least_sensitive": least and least.what,
        }


def check_own(alone: CapturedRun, together: CapturedRun, again: CapturedRun) -> OwnCheck:
    """All in the script's own precision; `again` is one worker with another order of additions."""
    changes = dict(relative(alone, again, {}))
    usual = statistics.median([c for c in changes.values() if 0 < c <= LARGEST] or [0.0])
    floor = min(LARGEST_FLOOR, bound(alone, torch.float32, len(alone.losses)))
    judged = [
        Difference(what, apart, max(floor, MARGIN * max(usual, changes.get(what, 0.0))))
        for what, apart in relative(alone, together, {})
        if what not in changes or math.isnan(apart) or changes[what] <= LARGEST
    ]
    return OwnCheck(judged, _least_sensitive(alone, judged))


def _least_sensitive(alone: CapturedRun, judged: list[Difference]) -> Difference | None:
    """Of parameters; those without any tensor that is judged come first."""
    tolerances = {d.what: d.tolerance for d in judged}
    every = [
        Difference(name, 0.0, min((tolerances.get(n, math.inf) for n in shows), default=math.inf))
        for name, shows in _where_gradients_show(alone).items()
    ]
    return max(every, key=lambda d: d.tolerance, default=None)


def _where_gradients_show(alone: CapturedRun) -> dict[str, list[str]]:
    states: dict[str, list[str]] = {}
    for name, tensor in alone.optimizer.items():
        if tensor.dim() > 0 and tensor.is_floating_point():  # the number of steps is a scalar
            states.setdefault(name.rpartition("/")[0], []).append(name + _OF_OPTIMIZER)
    if states:
        return states
    floats = [name for name, tensor in alone.tensors.items() if tensor.is_floating_point()]
    return {name: [name] for name in floats}
