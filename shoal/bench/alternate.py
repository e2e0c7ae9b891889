"""Ratios of two ways to do one thing, measured alternately in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    """Milliseconds per step: the median over rounds, and its quartiles."""

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
    """Time `steps` calls of each way in turn, `rounds` times; milliseconds per call, by way.

    `steps` may differ between ways. The order is reversed every round, so that no way is always
    first. A first round is not timed.
    """
    times_ms: dict[str, list[float]] = {name: [] for name in ways}
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
                times_ms[name].append((time.perf_counter() - start_s) * 1e3 / calls)
    return times_ms


def ratios(ours: list[float], theirs: list[float]) -> Timing:
    """Their time over ours, round by round; above 1 Shoal is faster. The values have no unit."""
    return Timing.of([b / a for a, b in zip(ours, theirs, strict=True)])
