"""What one run of `shoal verify` wrote, and the difference of two such runs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from shoal.runtime.wording import counted

Tensors = dict[str, Tensor]
LAMBDA = 4.0
SAME_LOSS = 1e-4  # relative; kernels that add in any order change less


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
        document = json.loads((folder / "capture.json").read_text())
        return cls(
            tensors=load_file(folder / "final.safetensors"),
            start=_read(folder / "start.safetensors"),
            early=_read(folder / "early.safetensors"),
            optimizer=_read(folder / "optimizer.safetensors"),
            calls=1 + len(list(folder.glob("*/capture.json"))),
            **document,
        )

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
        for i, (loss, other) in enumerate(zip(self.losses[:1], again.losses, strict=False)):
            if abs(loss - other) > SAME_LOSS * max(1.0, abs(loss)):
                return f"the loss of step {i + 1}, {loss:.6g} and {other:.6g}"
        return None


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


def distance(a: Tensor, b: Tensor | None) -> float:
    """The largest difference of two elements; nan where there is nothing to compare."""
    if b is None or a.shape != b.shape:
        return math.nan
    if not a.numel() or torch.equal(a, b):
        return 0.0
    return float((a.double() - b.double()).abs().max())


def bound(run: CapturedRun, dtype: torch.dtype, steps: int) -> float:
    """λ·u·√(n·k), relative to the size of what is summed; exact runs have the same bits."""
    if run.exact:
        return 0.0
    return LAMBDA * torch.finfo(dtype).eps / 2 * math.sqrt(max(1, run.additions) * max(1, steps))


def _read(file: Path) -> Tensors:
    return load_file(file) if file.is_file() else {}
