"""What one run of `shoal verify` wrote, and two runs compared in their first steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from shoal.errors import ShoalError
from shoal.runtime.run_dir import read
from shoal.runtime.wording import counted

Tensors = dict[str, Tensor]
LAMBDA = 4.0
SAME_LOSS = 1e-4  # relative; kernels that add in any order change less
SENSITIVITY = 1e-6  # a larger relative difference in double precision is an error
MARGIN = 10.0
LARGEST = 0.01
LARGEST_IN_DOUBLE = 1e-4  # what rounding in float32 explains; a larger change has another reason
LARGEST_FLOOR = 3e-5
_SHARE_OF_WEIGHT = 1e-7
_SHARE_OF_UPDATES = 1e-4
_OF_OPTIMIZER = " of the optimizer"


@dataclass(frozen=True)
class CapturedRun:
    """`tensors` are the final ones; `start`, `early` and `optimizer` where they were asked for."""

    losses: list[float]
    tensors: Tensors
    additions: int
    replicas_apart: float
    switched_off: list[str]
    exact: bool
    ignored_targets: str | None = None  # some are -100, the ignore_index, and nothing counts them
    has_ragged_targets: bool = False  # lists of any length, such as boxes, and nothing counts them
    draws: str | None = None  # a module whose forward draws random numbers
    goes_on: bool = False  # the script has caught what ends it, and trained on
    calls: int = 1  # of shoal.run; the first one is compared
    start: Tensors = field(default_factory=dict)
    early: Tensors = field(default_factory=dict)
    optimizer: Tensors = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> CapturedRun:
        document = read(folder / "capture.json")
        if document is None:
            raise ShoalError(f"{folder} has no result of the run that can be read")
        files = {"tensors": "final", "start": "start", "early": "early", "optimizer": "optimizer"}
        for key, name in files.items():
            if (folder / f"{name}.safetensors").is_file():
                document[key] = load_file(folder / f"{name}.safetensors")
        return cls(calls=1 + len(list(folder.glob("*/capture.json"))), **document)

    @property
    def not_finite(self) -> str | None:
        """The first loss that is not a number, or a tensor; None where there is none."""
        for i, loss in enumerate(self.losses):
            if not math.isfinite(loss):
                return f"the loss of step {i + 1} is {loss}"
        for name, tensor in self.tensors.items():
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                return f"{name} is nan after {counted(len(self.losses), 'step')}"
        return None

    def changes_by_chance(self, again: CapturedRun) -> str | None:
        """What differs in a second run of the same; None where nothing does."""
        for name, tensor in self.start.items():
            if distance(tensor, again.start.get(name)) != 0.0:
                return f"{name} before the first step"
        loss = self.losses[0]
        other = again.losses[0]
        if abs(loss - other) > SAME_LOSS * max(1.0, abs(loss)):
            return f"the loss of step 1, {loss:.6g} and {other:.6g}"
        return None

    def bound(self, dtype: torch.dtype, steps: int) -> float:
        """λ·u·√(n·k), relative to the size of what is summed; exact runs have the same bits."""
        if self.exact:
            return 0.0
        terms = max(1, self.additions) * max(1, steps)
        return LAMBDA * torch.finfo(dtype).eps / 2 * math.sqrt(terms)


@dataclass(frozen=True)
class Difference:
    """The difference of one loss or tensor between two runs, and its tolerance."""

    what: str
    difference: float
    tolerance: float

    @property
    def is_equal(self) -> bool:
        # False for nan; a tolerance that is not finite would allow any difference
        return math.isfinite(self.tolerance) and self.difference <= self.tolerance

    @property
    def excess(self) -> float:
        """How many times the tolerance."""
        if math.isnan(self.difference):
            return math.inf
        return self.difference / max(self.tolerance, 1e-300)


def worst(among: Sequence[Difference]) -> Difference:
    """The one that is closest to its tolerance, or exceeds it the most."""
    return max(among, key=lambda d: d.excess, default=Difference("nothing", 0.0, 0.0))


def distance(a: Tensor, b: Tensor | None) -> float:
    """The largest difference of two elements; nan where there is nothing to compare."""
    if b is None or a.shape != b.shape:
        return math.nan
    if not a.numel() or torch.equal(a, b):
        return 0.0
    return float((a.double() - b.double()).abs().max())


# ------------------------------------------------------------------------------ the first steps


@dataclass(frozen=True)
class FirstSteps:
    """The first steps of two runs: updates and optimizer state, relative to their size."""

    tensors: list[Difference]

    @property
    def ok(self) -> bool:
        return all(d.is_equal for d in self.tensors)

    @property
    def worst(self) -> Difference:
        return worst(self.tensors)


@dataclass(frozen=True)
class DoubleCheck(FirstSteps):
    """Two runs in double precision compared, and the rounding of the script's own precision.

    `rounding` and `loss_rounding` are absolute: of each tensor and of each loss, on one worker.
    `order` is what another order has changed on one worker, where rounding does not explain it.
    """

    steps: int = 0
    rounding: dict[str, float] = field(default_factory=dict)
    loss_rounding: list[float] = field(default_factory=list)
    was_reordered: bool = False
    order: Difference | None = None

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
            "largest_relative_difference": asdict(self.worst),
            "largest_rounding": {"what": what, "difference": rounding},
            "largest_loss_rounding": max(self.loss_rounding, default=0.0),
            "reordered": self.was_reordered,
            "depends_on_order": self.order and asdict(self.order),
        }


def check(
    narrow: CapturedRun, alone: CapturedRun, together: CapturedRun, again: Callable[[], CapturedRun]
) -> DoubleCheck:
    """`narrow` is in the script's own precision; `again` runs where parts are not in double."""
    before = narrow.early or narrow.tensors
    changes = {name: distance(t, before.get(name)) for name, t in alone.tensors.items()}
    rounding = {name: change for name, change in changes.items() if math.isfinite(change)}
    plain = dict(relative(alone, together, rounding))
    found = [Difference(what, value, SENSITIVITY) for what, value in plain.items()]
    was_reordered = not all(d.is_equal for d in found)
    order = None
    if was_reordered:
        change = dict(relative(alone, again(), rounding))
        largest = worst([Difference(what, by, LARGEST_IN_DOUBLE) for what, by in change.items()])
        order = None if largest.is_equal else largest
        explained = {n: by if by <= LARGEST_IN_DOUBLE else 0.0 for n, by in change.items()}
        found = [
            Difference(
                n, value, max(SENSITIVITY, min(MARGIN * explained.get(n, 0.0), LARGEST_IN_DOUBLE))
            )
            for n, value in plain.items()
        ]
    losses = [abs(a - b) for a, b in zip(narrow.losses, alone.losses, strict=False)]
    return DoubleCheck(found, len(alone.losses), rounding, losses, was_reordered, order)


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
    sizes: dict[str, float] = {}  # the largest root mean square of each state, such as exp_avg
    for name, tensor in alone.optimizer.items():
        key = name.rpartition("/")[2]
        sizes[key] = max(sizes.get(key, 0.0), _rms(tensor))
    for name, tensor in alone.optimizer.items():
        root = math.sqrt(max(1, tensor.numel()))
        size = _norm(tensor) + root * _SHARE_OF_UPDATES * sizes[name.rpartition("/")[2]]
        yield name + _OF_OPTIMIZER, _apart(tensor, other.optimizer.get(name), size)
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


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm()) if tensor.is_floating_point() else 0.0


def _rms(tensor: Tensor) -> float:
    return _norm(tensor) / math.sqrt(max(1, tensor.numel()))


@dataclass(frozen=True)
class OwnCheck(FirstSteps):
    """A script that does not run in double precision: how small an error its own precision shows.

    The tolerance is measured: ten times what one worker changes when the same samples are added up
    in another order and in other batch shapes, of this tensor or of the median tensor, whichever
    is more; not below what a sum in float32 may change, up to 3e-5. A tensor that another order
    changes by more than 1% is all rounding, and is not judged.

    An error of a gradient shows in the optimizer's state, or in the update where there is none:
    `least` is the parameter whose gradient may be the most wrong without being found.
    """

    least: Difference | None

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "largest_relative_difference": asdict(self.worst),
            "errors_found_above": self.least and self.least.tolerance,
            "least_sensitive": self.least and self.least.what,
        }


def check_own(alone: CapturedRun, together: CapturedRun, again: CapturedRun) -> OwnCheck:
    """All in the script's own precision; `again` is one worker with another order of additions."""
    changes = dict(relative(alone, again, {}))
    usual = statistics.median([c for c in changes.values() if 0 < c <= LARGEST] or [0.0])
    floor = min(LARGEST_FLOOR, alone.bound(torch.float32, len(alone.losses)))
    judged = [
        Difference(what, apart, max(floor, MARGIN * max(usual, changes.get(what, 0.0))))
        for what, apart in relative(alone, together, {})
        if what not in changes or math.isnan(apart) or changes[what] <= LARGEST
    ]
    tolerances = {d.what: d.tolerance for d in judged}
    every = [
        Difference(name, 0.0, min((tolerances.get(n, math.inf) for n in shows), default=math.inf))
        for name, shows in _where_gradients_show(alone).items()
    ]
    return OwnCheck(judged, max(every, key=lambda d: d.tolerance, default=None))


def _where_gradients_show(alone: CapturedRun) -> dict[str, list[str]]:
    """The tensors that show an error of a gradient, by parameter."""
    states: dict[str, list[str]] = {}
    for name, tensor in alone.optimizer.items():
        if tensor.dim() > 0 and tensor.is_floating_point():  # the number of steps is a scalar
            states.setdefault(name.rpartition("/")[0], []).append(name + _OF_OPTIMIZER)
    return states or {n: [n] for n, tensor in alone.tensors.items() if tensor.is_floating_point()}
