"""Make a sum of absolute errors small: reweighted Gauss-Newton steps inside bounds.

A coordinate that leaves its prior costs `stiffness` times the square of its distance, so one that
the errors hardly depend on stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_FARTHEST = 1.0  # in one step, along each coordinate
_LEAST_GAIN = 3e-3  # of the cost; a smaller one ends the search
_SMALL = 0.02  # residuals below this weigh no more
_TRIES = 6  # of one round, each with more damping
_NO_SLOPE = 1e-6


class Bounded(Protocol):
    """Residuals by a point that stays between `low` and `high`."""

    low: Floats
    high: Floats
    prior: Floats
    stiffness: Floats

    def residuals(self, point: Floats) -> Floats: ...
    def slopes(self, point: Floats) -> Floats:
        """By residual and coordinate."""
        ...


@dataclass
class Descent:
    point: Floats
    residuals: Floats
    moved: NDArray[np.bool_]  # coordinates that any residual depends on, at a point on the way
    damping: float = 1e-2

    @property
    def error(self) -> float:
        return float(np.abs(self.residuals).mean())


def descend(
    problem: Bounded, start: Floats, rounds: int, on_error: Callable[[float], None]
) -> Descent:
    """The point where steps of at most so many rounds end."""
    now = Descent(start, problem.residuals(start), np.zeros(len(start), dtype=np.bool_))
    for _ in range(rounds):
        before = _cost(problem, now.point, now.residuals)
        _advance(problem, now)
        on_error(now.error)
        if _cost(problem, now.point, now.residuals) > before * (1 - _LEAST_GAIN):
            break
    return now


def _advance(problem: Bounded, now: Descent) -> None:
    """One step that makes the cost smaller, if there is one."""
    slopes = problem.slopes(now.point)
    now.moved |= np.abs(slopes).max(axis=0) > _NO_SLOPE
    weights = 1 / np.maximum(np.abs(now.residuals), _SMALL)
    normal = slopes.T @ (slopes * weights[:, None]) + np.diag(2 * problem.stiffness)
    pull = slopes.T @ (now.residuals * weights)
    pull += 2 * problem.stiffness * (now.point - problem.prior)
    for _ in range(_TRIES):
        shift = _step(problem, now, normal, pull)
        if _moves(problem, now, np.clip(now.point + shift, problem.low, problem.high)):
            now.damping /= 4
            return
        now.damping *= 8


def _step(problem: Bounded, now: Descent, normal: Floats, pull: Floats) -> Floats:
    """The damped step; a coordinate that it would push out of its bounds stays where it is."""
    scale = np.diag(normal).copy()
    scale[scale == 0] = 1.0
    damped = normal + np.diag(now.damping * scale + 1e-9)
    free = np.ones(len(pull), dtype=np.bool_)
    shift = np.zeros(len(pull))
    for _ in range(len(pull)):
        shift[:] = 0.0
        shift[free] = -np.linalg.solve(damped[np.ix_(free, free)], pull[free])
        down = (shift < 0) & (now.point <= problem.low)
        up = (shift > 0) & (now.point >= problem.high)
        if not (down | up).any():
            break
        free &= ~(down | up)
    return np.clip(shift, -_FARTHEST, _FARTHEST)


def _cost(problem: Bounded, point: Floats, residuals: Floats) -> float:
    left = problem.stiffness @ (point - problem.prior) ** 2
    return float(np.abs(residuals).sum() + left)


def _moves(problem: Bounded, now: Descent, point: Floats) -> bool:
    """Go there if the cost is smaller."""
    residuals = problem.residuals(point)
    if _cost(problem, point, residuals) >= _cost(problem, now.point, now.residuals):
        return False
    now.point = point
    now.residuals = residuals
    return True
