"""Does a strategy give the single-device result? Checked on the user's own script.

The script runs on one worker and under the strategy, with the same seed. The loss of every step
and every final tensor are compared. Equal means equal up to rounding, which is bounded like this:

- A sum of n terms that are added in another order changes by about λ·u·√n of its size, where u is
  the unit roundoff of the dtype (Higham & Mary, 2019, with λ = 4). A gradient element sums
  n = samples × positions terms, and k steps carry k such errors: tolerance λ·u·√(n·k).
- Training can amplify that (Adam divides by a gradient that may be all rounding), and autocast
  rounds more coarsely. Where the plain bound does not hold, the script runs on one worker again
  with the same additions in another order: each micro-batch in as many pieces as there are
  workers, or reversed where there is BatchNorm. The change, times 10, is then the tolerance.
- A tolerance is at most 1% of the largest value in the model, or of the loss. If rounding changes
  more than that, the result is "not equal". The loss of the first step comes before any update,
  so nothing can have amplified it: there the bound of the coarsest dtype holds. This detects a
  loss that is a sum instead of a mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

LAMBDA = 4.0
MARGIN = 10.0
LARGEST = 0.01
COARSEST = torch.finfo(torch.bfloat16).eps


@dataclass(frozen=True)
class CapturedRun:
    """What one run wrote."""

    losses: list[float]
    tensors: dict[str, Tensor]
    additions: int
    replicas_apart: float
    switched_off: list[str]
    exact: bool

    @classmethod
    def read(cls, folder: Path) -> CapturedRun:
        document = json.loads((folder / "capture.json").read_text())
        return cls(tensors=load_file(folder / "final.safetensors"), **document)


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

    @property
    def ok(self) -> bool:
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
        return max(
            among,
            key=lambda d: (
                math.inf if math.isnan(d.difference) else d.difference / max(d.tolerance, 1e-300)
            ),
        )

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
        }


def judge(
    alone: CapturedRun, together: CapturedRun, again: Callable[[], CapturedRun]
) -> Verification:
    """Compare two runs; `again` runs on one worker with additions in another order, if needed."""
    verification = compare(alone, together, None)
    if verification.ok or (alone.exact and together.exact):
        return verification
    return compare(alone, together, again())


def compare(
    alone: CapturedRun, together: CapturedRun, reordered: CapturedRun | None
) -> Verification:
    return Verification(
        steps=len(alone.losses),
        additions=alone.additions,
        losses=_losses(alone, together, reordered),
        tensors=_tensors(alone, together, reordered),
        replicas_apart=together.replicas_apart,
        measured_rounding=reordered is not None,
        switched_off=alone.switched_off,
    )


def bound(run: CapturedRun, dtype: torch.dtype, steps: int) -> float:
    """λ·u·√(n·k), relative to the size of what is summed; exact runs have the same bits."""
    if run.exact:
        return 0.0
    return LAMBDA * torch.finfo(dtype).eps / 2 * math.sqrt(max(1, run.additions) * max(1, steps))


def _losses(
    alone: CapturedRun, together: CapturedRun, reordered: CapturedRun | None
) -> list[Difference]:
    differences = []
    change = 0.0
    count = max(len(alone.losses), len(together.losses))
    for i in range(count):
        pair = [run.losses[i] if i < len(run.losses) else math.nan for run in (alone, together)]
        tolerance = bound(alone, torch.float32, i + 1) * max(1.0, abs(pair[0]))
        if reordered is not None and i < len(reordered.losses):
            change = max(change, _finite(abs(reordered.losses[i] - pair[0])))
            most = (LARGEST if i else COARSEST) * max(1.0, abs(pair[0]))
            tolerance = max(tolerance, min(MARGIN * change, most))
        difference = 0.0 if pair[0] == pair[1] else abs(pair[0] - pair[1])
        differences.append(Difference(f"step {i + 1}", difference, tolerance))
    return differences


def _tensors(
    alone: CapturedRun, together: CapturedRun, reordered: CapturedRun | None
) -> list[Difference]:
    differences = []
    floats = [t for t in alone.tensors.values() if t.is_floating_point() and t.numel()]
    largest = _finite(max((float(t.abs().max()) for t in floats), default=0.0))
    for name, tensor in alone.tensors.items():
        other = together.tensors.get(name)
        tolerance = 0.0
        if tensor.is_floating_point() and tensor.numel():
            size = float(tensor.abs().max())
            tolerance = bound(alone, tensor.dtype, len(alone.losses)) * max(size, 1e-3)
        if reordered is not None:
            change = _finite(distance(tensor, reordered.tensors.get(name)))
            tolerance = max(tolerance, min(MARGIN * change, LARGEST * largest))
        differences.append(Difference(name, distance(tensor, other), tolerance))
    missing = sorted(set(together.tensors) - set(alone.tensors))
    return differences + [Difference(name, math.nan, 0.0) for name in missing]


def _finite(change: float) -> float:
    """0 for a run that diverged, which measures nothing."""
    return change if math.isfinite(change) else 0.0


def distance(a: Tensor, b: Tensor | None) -> float:
    """The largest difference of two elements; nan where there is nothing to compare."""
    if b is None or a.shape != b.shape:
        return math.nan
    if not a.numel() or torch.equal(a, b):
        return 0.0
    return float((a.double() - b.double()).abs().max())
