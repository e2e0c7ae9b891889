"""Does a strategy give the single-device result? Checked on the user's own script.

The script runs on one worker and under the strategy, with the same seed. The loss of every step
and every final tensor are compared. Then the first steps run again, both ways, in double
precision, where rounding all but vanishes and an error does not, whatever kernels a machine has.

- In double precision what an update adds to a parameter, and the optimizer's state, which Adam's
  normalization does not hide, have to agree to one part in 10⁶ of their own size. This finds a
  reduction that is wrong by one part in 10⁴:

      |together - alone| / (|alone - start| + ε)    of every tensor of the model
      |together - alone| / (|alone| + ε)            of every tensor of the optimizer

  ε is what may be all rounding: below 1e-7 of the tensor, 1e-4 of the largest update in the model,
  or the rounding that was measured. Where a model computes parts in float32 even so, these steps
  run once more with additions in another order, and ten times the change is the tolerance, at most
  1e-4. A larger change is not rounding: the result depends on how batches are cut.
- In the script's own precision they have to agree up to rounding, which is measured: ten times
  what one worker's run differs from its run in double precision.
- Training can amplify rounding: a ReLU that switches changes all gradients below it. If the runs
  agree in double precision, such differences are allowed up to 1% of the largest value in the
  model, or of the loss, or ten times what rounding has changed on one worker, if that is more;
  up to 10% where double precision shows as much amplification. Then all steps run in double
  precision, since a later one may have got other samples. Where this does not suffice, the script
  runs on one worker again with additions in another order, which is measured, too.

Where a script does not run in double precision, its first steps are compared in its own
(`OwnCheck`). Final tensors are bounded like this: a sum of n terms that are added in another order
changes by about λ·u·√n of its size, where u is the unit roundoff of the dtype (Higham & Mary, 2019,
with λ = 4). A gradient element sums n = samples × positions terms, and k steps carry k such errors:
tolerance λ·u·√(n·k). If that does not hold, the run in another order measures it, at most 1%.

The loss of the first step comes before any update, so nothing can have amplified it: there the
bound of the coarsest dtype holds. This detects a loss that is a sum instead of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from shoal.observe.double_check import (
    LARGEST,
    MARGIN,
    CapturedRun,
    Difference,
    DoubleCheck,
    OwnCheck,
    distance,
    worst,
)

COARSEST = torch.finfo(torch.bfloat16).eps
LARGEST_CHAOTIC = 0.1
_ROUNDOFF_RATIO = torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Verification:
    """Whether two runs are equal, and every difference between them.

    `amplified` are tensors that differ by more than rounding alone, which is allowed if `double`
    is equal; `own` is there where the script does not run in double precision.
    """

    steps: int
    additions: int
    losses: list[Difference]
    tensors: list[Difference]
    replicas_apart: float
    measured_rounding: bool
    switched_off: list[str]
    double: DoubleCheck | None = None
    own: OwnCheck | None = None
    amplified: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.is_equal and all(c.ok for c in (self.double, self.own) if c is not None)

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

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "steps": self.steps,
            "additions": self.additions,
            "largest_loss_difference": asdict(worst(self.losses)),
            "largest_tensor_difference": asdict(worst(self.tensors)),
            "first_loss_that_differs": self.first_loss and asdict(self.first_loss),
            "first_tensor_that_differs": self.first_tensor and asdict(self.first_tensor),
            "replicas_apart": self.replicas_apart,
            "rounding_measured": self.measured_rounding,
            "switched_off": self.switched_off,
            "double": self.double and self.double.to_json(),
            "own_precision": self.own and self.own.to_json(),
            "amplified": self.amplified,
        }


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
    rounding = _Rounding(alone, reordered, double)
    tensors = list(rounding.tensors(together))
    return Verification(
        steps=len(alone.losses),
        additions=alone.additions,
        losses=list(rounding.losses(together)),
        tensors=tensors,
        replicas_apart=together.replicas_apart,
        measured_rounding=reordered is not None or double is not None,
        switched_off=alone.switched_off,
        double=double,
        amplified=[d.what for d in tensors if rounding.is_amplified(d)],
    )


@dataclass(frozen=True)
class _Rounding:
    """What rounding changes in the run of one worker, as far as it was measured."""

    alone: CapturedRun
    reordered: CapturedRun | None
    double: DoubleCheck | None

    def losses(self, together: CapturedRun) -> Iterator[Difference]:
        for i in range(max(len(self.alone.losses), len(together.losses))):
            runs = (self.alone.losses, together.losses)
            mine, other = (losses[i] if i < len(losses) else math.nan for losses in runs)
            difference = 0.0 if mine == other else abs(mine - other)
            size = max(1.0, abs(mine))
            plain = self.alone.bound(torch.float32, i + 1) * size
            change = self._of_loss(i)
            if i == 0:
                tolerance = max(plain, min(MARGIN * change, COARSEST * size))
            else:
                tolerance = self._tolerance(difference, plain, change, self._largest * size)
            yield Difference(f"step {i + 1}", difference, tolerance)

    def tensors(self, together: CapturedRun) -> Iterator[Difference]:
        floats = [t for t in self.alone.tensors.values() if t.is_floating_point() and t.numel()]
        largest = _finite(max((float(t.abs().max()) for t in floats), default=0.0))
        amplified = self._largest
        if self._is_equal_in_double and self.alone.losses:
            last = self.alone.losses[-1]
            change = self._of_loss(len(self.alone.losses) - 1) / max(1.0, _finite(abs(last)))
            amplified = max(amplified, MARGIN * change)
        for name, tensor in self.alone.tensors.items():
            difference = distance(tensor, together.tensors.get(name))
            tolerance = 0.0
            if tensor.is_floating_point() and tensor.numel():
                plain = self._plain(name)
                change = self._of_tensor(name)
                tolerance = self._tolerance(difference, plain, change, amplified * largest)
            yield Difference(name, difference, tolerance)
        for name in sorted(set(together.tensors) - set(self.alone.tensors)):
            yield Difference(name, math.nan, 0.0)

    def is_amplified(self, found: Difference) -> bool:
        """Whether it is equal only because the runs are equal in double precision."""
        if found.difference == 0.0 or not found.is_equal:
            return False
        return found.difference > max(self._plain(found.what), MARGIN * self._of_tensor(found.what))

    @property
    def _is_equal_in_double(self) -> bool:
        return self.double is not None and self.double.ok

    @property
    def _largest(self) -> float:
        """What amplified rounding may change, relative to the loss or the largest value."""
        if self.double is None or not self.double.ok:
            return LARGEST
        explained = MARGIN * _finite(self.double.worst.difference) * _ROUNDOFF_RATIO
        return max(LARGEST, min(explained, LARGEST_CHAOTIC))

    def _tolerance(self, difference: float, plain: float, change: float, most: float) -> float:
        """`plain` is the bound of plain rounding, `most` what is allowed if it is amplified."""
        measured = max(plain, min(MARGIN * change, most))
        if difference <= measured or not self._is_equal_in_double:
            return measured
        return max(plain, most, MARGIN * change)

    def _plain(self, name: str) -> float:
        tensor = self.alone.tensors[name]
        size = max(float(tensor.abs().max()), 1e-3)
        return self.alone.bound(tensor.dtype, len(self.alone.losses)) * size

    def _of_loss(self, i: int) -> float:
        """Of the loss of a step; two runs that have drifted apart do not come together again."""
        changes = [] if self.double is None else self.double.loss_rounding[: i + 1]
        if self.reordered is not None:
            pairs = zip(self.alone.losses[: i + 1], self.reordered.losses, strict=False)
            changes = [*changes, *(abs(a - b) for a, b in pairs)]
        return max(map(_finite, changes), default=0.0)

    def _of_tensor(self, name: str) -> float:
        change = 0.0
        if self.double is not None:
            steps = len(self.alone.losses) / max(1, self.double.steps)
            change = self.double.rounding.get(name, 0.0) * max(1.0, steps)
        if self.reordered is not None:
            moved = distance(self.alone.tensors[name], self.reordered.tensors.get(name))
            change = max(change, _finite(moved))
        return change


def _finite(change: float) -> float:
    """0 for a run that diverged, which measures nothing."""
    return change if math.isfinite(change) else 0.0
