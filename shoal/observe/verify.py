"""Does a strategy give the single-device result? Checked on the user's own script.

The script runs on one worker and under the strategy, with the same seed. The loss of every step
and every final tensor are compared. Then the first steps run again, both ways, in double
precision, where rounding all but vanishes and an error does not (`double_check.py`).

- In double precision the runs have to agree to one part in 10⁶ of every update. This finds a
  reduction that is wrong by one part in 10⁴, and does not depend on the machine.
- In the script's own precision they have to agree up to rounding, which is measured: ten times
  what one worker's run differs from its run in double precision.
- Training can amplify rounding: a ReLU that switches changes all gradients below it, and Adam
  divides by a gradient that may be all rounding. If the runs agree in double precision, such
  differences are allowed up to 1% of the largest value in the model, or of the loss, or ten times
  what rounding has changed on one worker, if that is more. Then all steps run in double precision,
  since a later one may have got other samples. Where this does not suffice, the script
  runs on one worker again with the same additions in another order (each micro-batch in as many
  pieces as there are workers, or reversed where there is BatchNorm), which is measured, too.
- How much training amplifies rounding shows in double precision as well: the same steps turn
  1e-16 into what the runs differ by there. Ten times that difference, scaled by the ratio of the
  unit roundoffs, is allowed up to 10% instead of 1%.

Where a script does not run in double precision, its first steps are compared in its own
(`OwnCheck`): with the rounding that another order of additions shows on one worker, and with a
sentence about the size of the errors that this would find. Final tensors are bounded like this: a
sum of n terms that are added in another order changes by about λ·u·√n of its size, where u is the
unit roundoff of the dtype (Higham & Mary, 2019, with λ = 4). A gradient element sums n = samples ×
positions terms, and k steps carry k such errors: tolerance λ·u·√(n·k). If that does not hold, the
run in another order measures it, and at most 1% is allowed.

The loss of the first step comes before any update, so nothing can have amplified it: there the
bound of the coarsest dtype holds. This detects a loss that is a sum instead of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from shoal.observe.captured_run import CapturedRun, Difference, bound, distance
from shoal.observe.double_check import LARGEST, MARGIN, DoubleCheck, OwnCheck

COARSEST = torch.finfo(torch.bfloat16).eps
LARGEST_CHAOTIC = 0.1
_ROUNDOFF_RATIO = torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Verification:
    """Whether two runs are equal, and every difference between them."""

    steps: int
    additions: int
    losses: list[Difference]
    tensors: list[Difference]
    replicas_apart: float
    measured_rounding: bool
    switched_off: list[str]
    double: DoubleCheck | None = None
    own: OwnCheck | None = None  # where the script does not run in double precision
    amplified: list[str] = field(default_factory=list)
    """Tensors that differ by more than rounding alone, which is allowed if `double` is equal."""

    @property
    def ok(self) -> bool:
        if self.double is not None and not self.double.ok:
            return False
        if self.own is not None and not self.own.ok:
            return False
        return self.is_equal

    @property
    def is_equal(self) -> bool:
        """In the script's own precision."""
        every = [*self.losses, *self.tensors]
        return self.steps > 0 and self.replicas_apart == 0 and all(d.is_equal for d in every)

    @property
    def first_loss(self) -> Difference | None:
        """The first step whose loss differs."""
        return next((d for d in self.losses if not d.is_equal), None)

    @property
    def first_tensor(self) -> Difference | None:
        """The first tensor that differs, in the order of the model."""
        return next((d for d in self.tensors if not d.is_equal), None)

    def worst(self, among: list[Difference]) -> Difference:
        """The one that is closest to its tolerance, or exceeds it the most."""
        return max(among, key=lambda d: d.excess)

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "steps": self.steps,
            "additions": self.additions,
            "largest_loss_difference": asdict(self.worst(self.losses)) if self.losses else None,
            "largest_tensor_difference": asdict(self.worst(self.tensors)),
            "first_loss_that_differs": self.first_loss and asdict(self.first_loss),
            "first_tensor_that_differs": self.first_tensor and asdict(self.first_tensor),
            "replicas_apart": self.replicas_apart,
            "rounding_measured": self.measured_rounding,
            "switched_off": self.switched_off,
            "double": None if self.double is None else self.double.to_json(),
            "own_precision": None if self.own is None else self.own.to_json(),
            "amplified": self.amplified,
        }


@dataclass(frozen=True)
class _Measured:
    """What rounding changes, as far as it was measured."""

    reordered: CapturedRun | None = None
    double: DoubleCheck | None = None

    def of_loss(self, alone: CapturedRun, i: int) -> float:
        """Of the loss of a step; two runs that have drifted apart do not come together again."""
        changes = [] if self.double is None else self.double.loss_rounding[: i + 1]
        if self.reordered is not None:
            pairs = zip(alone.losses[: i + 1], self.reordered.losses, strict=False)
            changes = [*changes, *(abs(a - b) for a, b in pairs)]
        return max(map(_finite, changes), default=0.0)

    def of_tensor(self, alone: CapturedRun, name: str) -> float:
        change = 0.0
        if self.double is not None:
            steps = len(alone.losses) / max(1, self.double.steps)
            change = self.double.rounding.get(name, 0.0) * max(1.0, steps)
        if self.reordered is not None:
            moved = distance(alone.tensors[name], self.reordered.tensors.get(name))
            change = max(change, _finite(moved))
        return change

    def tolerance(self, difference: float, plain: float, change: float, most: float) -> float:
        """`plain` is the bound of plain rounding, `most` what is allowed if it is amplified."""
        measured = max(plain, min(MARGIN * change, most))
        if difference <= measured or self.double is None or not self.double.ok:
            return measured
        return max(plain, most, MARGIN * change)

    @property
    def largest(self) -> float:
        """What amplified rounding may change, relative to the loss or the largest value."""
        if self.double is None or not self.double.ok or not self.double.tensors:
            return LARGEST
        explained = MARGIN * _finite(self.double.worst.difference) * _ROUNDOFF_RATIO
        return max(LARGEST, min(explained, LARGEST_CHAOTIC))

    def relative_loss_change(self, alone: CapturedRun) -> float:
        """What rounding changes in the last loss, relative to it."""
        if not alone.losses:
            return 0.0
        last = len(alone.losses) - 1
        return self.of_loss(alone, last) / max(1.0, _finite(abs(alone.losses[last])))


def judge(
    alone: CapturedRun,
    together: CapturedRun,
    again: Callable[[], CapturedRun],
    double: DoubleCheck | None = None,
) -> Verification:
    """Compare two runs; `again` runs on one worker with additions in another order, if needed."""
    verification = compare(alone, together, None, double)
    is_wrong = double is not None and not double.ok
    if verification.is_equal or is_wrong or (alone.exact and together.exact):
        return verification
    return compare(alone, together, again(), double)


def compare(
    alone: CapturedRun,
    together: CapturedRun,
    reordered: CapturedRun | None,
    double: DoubleCheck | None = None,
) -> Verification:
    measured = _Measured(reordered, double)
    tensors = _tensors(alone, together, measured)
    return Verification(
        steps=len(alone.losses),
        additions=alone.additions,
        losses=_losses(alone, together, measured),
        tensors=tensors,
        replicas_apart=together.replicas_apart,
        measured_rounding=reordered is not None or double is not None,
        switched_off=alone.switched_off,
        double=double,
        amplified=[d.what for d in tensors if _is_amplified(d, alone, measured)],
    )


def _losses(alone: CapturedRun, together: CapturedRun, measured: _Measured) -> list[Difference]:
    differences = []
    count = max(len(alone.losses), len(together.losses))
    for i in range(count):
        pair = [run.losses[i] if i < len(run.losses) else math.nan for run in (alone, together)]
        difference = 0.0 if pair[0] == pair[1] else abs(pair[0] - pair[1])
        size = max(1.0, abs(pair[0]))
        plain = bound(alone, torch.float32, i + 1) * size
        change = measured.of_loss(alone, i)
        if i == 0:
            tolerance = max(plain, min(MARGIN * change, COARSEST * size))
        else:
            tolerance = measured.tolerance(difference, plain, change, measured.largest * size)
        differences.append(Difference(f"step {i + 1}", difference, tolerance))
    return differences


def _tensors(alone: CapturedRun, together: CapturedRun, measured: _Measured) -> list[Difference]:
    differences = []
    floats = [t for t in alone.tensors.values() if t.is_floating_point() and t.numel()]
    largest = _finite(max((float(t.abs().max()) for t in floats), default=0.0))
    amplified = measured.largest
    if measured.double is not None and measured.double.ok:
        amplified = max(amplified, MARGIN * measured.relative_loss_change(alone))
    for name, tensor in alone.tensors.items():
        difference = distance(tensor, together.tensors.get(name))
        tolerance = 0.0
        if tensor.is_floating_point() and tensor.numel():
            change = measured.of_tensor(alone, name)
            plain = _plain_bound(alone, name)
            tolerance = measured.tolerance(difference, plain, change, amplified * largest)
        differences.append(Difference(name, difference, tolerance))
    missing = sorted(set(together.tensors) - set(alone.tensors))
    return differences + [Difference(name, math.nan, 0.0) for name in missing]


def _plain_bound(alone: CapturedRun, name: str) -> float:
    tensor = alone.tensors[name]
    size = float(tensor.abs().max())
    return bound(alone, tensor.dtype, len(alone.losses)) * max(size, 1e-3)


def _is_amplified(found: Difference, alone: CapturedRun, measured: _Measured) -> bool:
    """Whether it is equal only because the runs are equal in double precision."""
    if found.difference == 0.0 or not found.is_equal:
        return False
    strict = max(_plain_bound(alone, found.what), MARGIN * measured.of_tensor(alone, found.what))
    return found.difference > strict


def _finite(change: float) -> float:
    """0 for a run that diverged, which measures nothing."""
    return change if math.isfinite(change) else 0.0
