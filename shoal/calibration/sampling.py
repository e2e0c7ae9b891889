"""Seconds per call, sampled for a given time: medians with their quartiles."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_ROUND_S = 1e-3  # shorter than a time slice, so that most rounds are undisturbed
_FEWEST = 3


class Sample(NamedTuple):
    """Seconds of one call: the median over rounds and the quartiles around it."""

    median_s: float
    low_s: float
    high_s: float

    @classmethod
    def of(cls, rounds_s: list[float]) -> Sample:
        low, median, high = statistics.quantiles(rounds_s, n=4, method="inclusive")
        return cls(median, low, high)


Synchronize = Callable[[], None]


def sample(call: Callable[[], Any], seconds: float, synchronize: Synchronize) -> Sample:
    """Rounds of equal numbers of calls, for about `seconds`; three rounds at least."""
    one_s = _one(call, synchronize)
    calls = max(1, int(_ROUND_S / max(one_s, 1e-9)))
    ends_s = time.perf_counter() + seconds
    rounds_s: list[float] = []
    while len(rounds_s) < _FEWEST or time.perf_counter() < ends_s:
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        rounds_s.append((time.perf_counter() - start_s) / calls)
    return Sample.of(rounds_s)


def sample_rounds(
    call: Callable[[], Any], calls: int, rounds: int, before_round: Synchronize
) -> Sample:
    """So many rounds on every rank, where a call needs all ranks."""
    call()
    rounds_s = []
    for _ in range(max(_FEWEST, rounds)):
        before_round()
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        rounds_s.append((time.perf_counter() - start_s) / calls)
    return Sample.of(rounds_s)


def _one(call: Callable[[], Any], synchronize: Synchronize) -> float:
    """One call after two to warm up."""
    call()
    call()
    synchronize()
    start_s = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start_s


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
