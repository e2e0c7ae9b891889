"""The same steps in double precision: what differs there is an error, not rounding.

A strategy that is right differs by about 1e-15 there, whatever kernels a machine chooses for which
batch shapes. A reduction that is wrong by one part in 10⁴ changes what an update adds to a
parameter by as much, however small that is beside the parameter, and the optimizer's state as
well, which Adam's normalization does not hide. So both are compared, relative to their own size:

    |together - alone| / (|alone - start| + ε)    of every tensor of the model
    |together - alone| / (|alone| + ε)            of every tensor of the optimizer

ε is what may be all rounding: below 1e-7 of the tensor, 1e-4 of the largest update in the model,
or the rounding that was measured in the script's own precision. Where a model computes parts in
float32 even so, these steps run once more with additions in another order, and ten times the
change is the tolerance, at most 1e-4. A larger change is not rounding: the result of the script
depends on how its batches are cut, as where the model draws random numbers or the loss is a sum,
and there is nothing that several workers could be equal to.

The rounding of the script's own precision is measured by the way: the run on one worker differs
from its run in double precision by nothing else.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.observe.captured_run import CapturedRun, Difference, Tensors, bound, distance

SENSITIVITY = 1e-6  # a larger relative difference in double precision is an error
MARGIN = 10.0
LARGEST = 0.01
LARGEST_IN_DOUBLE = 1e-4  # what rounding in float32 explains; a larger change has another reason
_SHARE_OF_WEIGHT = 1e-7
_SHARE_OF_UPDATES = 1e-4


@dataclass(frozen=True)
class DoubleCheck:
    """Two runs in double precision compared, and the rounding of the script's own precision.

    `rounding` and `loss_rounding` are absolute: of each tensor and of each loss, on one worker.
    """

    steps: int
    tensors: list[Difference]
    rounding: dict[str, float]
    loss_rounding: list[float]
    was_reordered: bool = False
    order: Difference | None = None
    """What another order has changed on one worker, where rounding does not explain it."""

    @property
    def ok(self) -> bool:
        return all(d.is_equal for d in self.tensors)

    @property
    def worst(self) -> Difference:
        return max(self.tensors, key=lambda d: d.excess)

    @property
    def largest_rounding(self) -> tuple[str, float]:
        """The tensor that rounding has changed the most, and by how much."""
        what = max(self.rounding, key=self.rounding.__getitem__, default="")
        return what, self.rounding.get(what, 0.0)

    def to_json(self) -> dict[str, Any]:
        what, rounding = self.largest_rounding
        return {
            "ok": self.ok,
            "steps": self.steps,
            "largest_relative_difference": asdict(self.worst) if self.tensors else None,
            "largest_rounding": {"what": what, "difference": rounding},
            "largest_loss_rounding": max(self.loss_rounding, default=0.0),
            "reordered": self.was_reordered,
            "depends_on_order": self.order and asdict(self.order),
        }


def check(
    narrow: CapturedRun,
    alone: CapturedRun,
    together: CapturedRun,
    again: Callable[[], CapturedRun],
) -> DoubleCheck:
    """`narrow` is the run on one worker in the script's own precision, the others in double.

    `again` is called if parts of the model are not computed in double.
    """
    rounding = _rounding_of(narrow, alone)
    plain = dict(relative(alone, together, rounding))
    found = [Difference(what, value, SENSITIVITY) for what, value in plain.items()]
    was_reordered = not all(d.is_equal for d in found)
    order = None
    if was_reordered:
        change = dict(relative(alone, again(), rounding))
        order = _unexplained(change)
        found = [Difference(n, value, _tolerance(change.get(n))) for n, value in plain.items()]
    losses = [abs(a - b) for a, b in zip(narrow.losses, alone.losses, strict=False)]
    return DoubleCheck(len(alone.losses), found, rounding, losses, was_reordered, order)


def _tolerance(change: float | None) -> float:
    if change is None or not math.isfinite(change):
        return SENSITIVITY
    if change > LARGEST_IN_DOUBLE:
        return SENSITIVITY
    return max(SENSITIVITY, min(MARGIN * change, LARGEST_IN_DOUBLE))


def _unexplained(changes: dict[str, float]) -> Difference | None:
    """The largest change by another order of additions, if that is more than rounding."""
    every = [Difference(what, change, LARGEST_IN_DOUBLE) for what, change in changes.items()]
    largest = max(every, key=lambda d: d.excess, default=None)
    return None if largest is None or largest.is_equal else largest


def _rounding_of(narrow: CapturedRun, alone: CapturedRun) -> dict[str, float]:
    before = narrow.early or narrow.tensors
    changes = {name: distance(t, before.get(name)) for name, t in alone.tensors.items()}
    return {name: change for name, change in changes.items() if math.isfinite(change)}


def relative(
    alone: CapturedRun, other: CapturedRun, rounding: dict[str, float]
) -> Iterator[tuple[str, float]]:
    """What is compared, and how far it is apart relative to its size."""
    moved = {n: t - alone.start[n] if n in alone.start else t for n, t in alone.tensors.items()}
    largest = max((_rms(t) for t in moved.values()), default=0.0)
    for name, tensor in alone.tensors.items():
        root = math.sqrt(max(1, tensor.numel()))
        unsure = _SHARE_OF_WEIGHT * _norm(tensor)
        unsure += root * (_SHARE_OF_UPDATES * largest + 2 * rounding.get(name, 0.0))
        yield name, _apart(tensor, other.tensors.get(name), _norm(moved[name]) + unsure)
    sizes = _sizes_by_key(alone.optimizer)
    for name, tensor in alone.optimizer.items():
        root = math.sqrt(max(1, tensor.numel()))
        size = _norm(tensor) + root * _SHARE_OF_UPDATES * sizes[_key(name)]
        yield f"{name} of the optimizer", _apart(tensor, other.optimizer.get(name), size)
    for name in sorted(set(other.tensors) - set(alone.tensors)):
        yield name, math.nan


def _apart(a: Tensor, b: Tensor | None, size: float) -> float:
    if b is None or a.shape != b.shape:
        return math.nan
    if torch.equal(a, b):
        return 0.0
    if not a.is_floating_point():
        return math.inf
    return _norm(a.double() - b.double()) / max(size, 1e-300)


def _sizes_by_key(optimizer: Tensors) -> dict[str, float]:
    """The largest root mean square of each kind of state, such as exp_avg."""
    sizes: dict[str, float] = {}
    for name, tensor in optimizer.items():
        sizes[_key(name)] = max(sizes.get(_key(name), 0.0), _rms(tensor))
    return sizes


def _key(name: str) -> str:
    return name.rpartition("/")[2]


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm()) if tensor.is_floating_point() else 0.0


def _rms(tensor: Tensor) -> float:
    return _norm(tensor) / math.sqrt(max(1, tensor.numel()))


LARGEST_FLOOR = 3e-5
_OF_OPTIMIZER = " of the optimizer"


@dataclass(frozen=True)
class OwnCheck:
    """A script that does not run in double precision: how small an error its own precision shows.

    What an update adds to a parameter and the state of the optimizer are compared, relative to
    their own size. The tolerance is measured: ten times what one worker changes when the same
    samples are added up in another order and in other batch shapes, of this tensor or of the
    median tensor, whichever is more; not below what a sum in float32 may change, up to 3e-5. A
    tensor that another order changes by more than 1% is all rounding, and is not judged.

    An error of a gradient shows in the optimizer's state, or in the update where there is none:
    `least` is the parameter whose gradient may be the most wrong without being found.
    """

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
