"""Predictions against measurements: errors, and whether the predicted best is the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

CLOSE = 0.05  # a pick that takes so much longer than the best is as good


@dataclass(frozen=True)
class PredictedRun:
    """One strategy: seconds for a global batch, predicted and measured, with their spreads."""

    strategy: str
    workers: int
    predicted_s: float
    predicted_low_s: float
    predicted_high_s: float
    measured_s: float
    measured_low_s: float
    measured_high_s: float

    @property
    def error(self) -> float:
        """Above 0: predicted longer than it took."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Verdict:
    """All strategies of one model."""

    model: str
    rows: tuple[PredictedRun, ...]
    refused: tuple[tuple[str, str], ...] = ()  # (strategy, why)

    @property
    def median_error(self) -> float | None:
        return median(abs(row.error) for row in self.rows) if self.rows else None

    @property
    def picked(self) -> PredictedRun:
        return min(self.rows, key=lambda row: row.predicted_s)

    @property
    def best(self) -> PredictedRun:
        return min(self.rows, key=lambda row: row.measured_s)

    @property
    def regret(self) -> float:
        """How much longer the predicted best takes than the measured best."""
        return self.picked.measured_s / self.best.measured_s - 1

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "model": self.model,
            "strategies": [{**asdict(row), "error": row.error} for row in self.rows],
            "refused": [{"strategy": name, "why": why} for name, why in self.refused],
            "median_error": self.median_error,
        }
        if self.rows:
            document |= {
                "predicted_best": self.picked.strategy,
                "measured_best": self.best.strategy,
                "regret": self.regret,
                "is_best_or_close": self.regret <= CLOSE,
            }
        return document


def median_error(verdicts: Sequence[Verdict]) -> float | None:
    """Over all strategies of all models."""
    errors = [abs(row.error) for verdict in verdicts for row in verdict.rows]
    return median(errors) if errors else None
