"""Ratios of two ways to do the same thing, measured alternately in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    """Milliseconds a step: the median over rounds, and the quartiles around it."""

    median_ms: float
    low_ms: float
    high_ms: float

    @classmethod
    def of(cls, rounds_ms: list[float]) -> Timing:
        if len(rounds_ms) < 2:
            return cls(rounds_ms[0], rounds_ms[0], rounds_ms[0])
        low, median, high = statistics.quantiles(rounds_ms, n=4)
        return cls(median, low, high)


def alternate(
    ways: Mapping[str, Callable[[], Any]],
    rounds: int,
    steps: int | Mapping[str, int],
    before_round: Callable[[], None] = lambda: None,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Time `steps` calls of each way in turn, `rounds` times over; ms a call, by way.

    `steps` may be another number for each way. The order is turned round every time, so that
    neither is always first. One round is run before the clock starts.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        names = list(ways) if round_ % 2 else list(ways)[::-1]
        for name in names:
            calls = steps if isinstance(steps, int) else steps[name]
            before_round()
            start_s = time.perf_counter()
            for _ in range(calls):
                ways[name]()
            after_round()
            if round_:
                found[name].append((time.perf_counter() - start_s) * 1e3 / calls)
    return found


def ratios(ours: list[float], theirs: list[float]) -> Timing:
    """Their time over ours, round by round: above 1 we are faster. No unit, despite the names."""
    return Timing.of([b / a for a, b in zip(ours, theirs, strict=True)])
