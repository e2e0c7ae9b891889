"""What one run of `shoal verify` wrote, and the difference of two such runs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class CapturedRun:
    """`tensors` are the final ones; `start`, `early` and `optimizer` where they were asked for."""

    losses: list[float]
    tensors: Tensors
    additions: int
    replicas_apart: float
    switched_off: list[str]
    exact: bool
    ignores_targets: bool = False  # some are -100, the ignore_index, and no `count` was given
    draws: str | None = None  # a module whose forward draws random numbers
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
            **document,
        )


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


def _read(file: Path) -> Tensors:
    return load_file(file) if file.is_file() else {}
