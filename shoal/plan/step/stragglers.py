"""How long a step takes where workers are unequal: order statistics of their times.

A worker's step takes its compute time times X, where X is log-normal with mean 1 and the standard
deviation `jitter`; in a share of steps it is a straggler, `straggler_slowdown` times as slow. X and
means of several X are kept as mixtures of log-normals, so that one quadrature serves them all:

    synchronous       E[max of n]
    quorum of k       E[k-th of n], of those that do not still compute an older step
    every H steps     E[max of n] of the mean of H
    asynchronous      E[X]: each worker goes at its own pace
    staleness s       between E[X] and the mean of s+1 steps: a worker waits only for those that
                      are more than s steps behind
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shoal.cluster import Noise
from shoal.schedules.mixing import edges_for

Floats = NDArray[np.float64]
_REACH = 9.0  # standard deviations on both sides
_POINTS = 601  # of each component
_LEAST = 1e-6  # a log-normal that is narrower is taken to be this wide
_RARE = 1e-9  # components of less weight are left out
_erf = np.vectorize(math.erf, otypes=[float])
_lgamma = np.vectorize(math.lgamma, otypes=[float])


@dataclass(frozen=True)
class StepTimes:
    """A mixture of log-normals: the time of a step, or the mean of several, over its compute."""

    weights: tuple[float, ...]
    logs: tuple[float, ...]  # mean of the logarithm of each component
    widths: tuple[float, ...]  # and its standard deviation

    @property
    def mean(self) -> float:
        return sum(
            weight * math.exp(log + width * width / 2)
            for weight, log, width in zip(self.weights, self.logs, self.widths, strict=True)
        )

    def grid(self) -> Floats:
        """Points where the distribution changes."""
        normal = np.linspace(-_REACH, _REACH, _POINTS)
        parts = [
            np.exp(log + width * normal) for log, width in zip(self.logs, self.widths, strict=True)
        ]
        return np.unique(np.concatenate(parts))

    def below(self, x: Floats) -> Floats:
        """The probability of at most x."""
        total = np.zeros_like(x)
        for weight, log, width in zip(self.weights, self.logs, self.widths, strict=True):
            total += weight * 0.5 * (1 + _erf((np.log(x) - log) / (width * math.sqrt(2))))
        return total


@lru_cache(maxsize=256)
def step_times(noise: Noise, steps: int = 1) -> StepTimes:
    """The mean of so many steps of one worker; a step's stragglers are drawn step by step."""
    parts = []
    for slow, weight in _stragglers(noise.straggler_share, steps):
        quick = steps - slow
        mean = (quick + slow * noise.straggler_slowdown) / steps
        squares = quick + slow * noise.straggler_slowdown**2
        variance = noise.jitter**2 * squares / steps**2
        width = max(math.sqrt(math.log1p(variance / mean**2)), _LEAST)
        parts.append((weight, math.log(mean) - width * width / 2, width))
    return StepTimes(*zip(*parts, strict=True))


def _stragglers(share: float, steps: int) -> list[tuple[int, float]]:
    """How many of a worker's steps are slow, with the probability of each number."""
    if share <= 0:
        return [(0, 1.0)]
    weights = [
        math.comb(steps, slow) * share**slow * (1 - share) ** (steps - slow)
        for slow in range(steps + 1)
    ]
    total = sum(weight for weight in weights if weight > _RARE)
    return [(slow, weight / total) for slow, weight in enumerate(weights) if weight > _RARE]


def is_even(noise: Noise) -> bool:
    """Whether all workers always take the same time."""
    has_stragglers = noise.straggler_share > 0 and noise.straggler_slowdown != 1
    return not (noise.jitter > 0 or has_stragglers)


@lru_cache(maxsize=4096)
def expected_rank(noise: Noise, workers: int, rank: int, each: int = 1, steps: int = 1) -> float:
    """E[the rank-th smallest of so many replicas' times], over the compute of a step.

    A replica is as slow as the slowest of its `each` workers. `steps`: the mean of so many.
    """
    if is_even(noise):
        return 1.0
    times = step_times(noise, steps)
    x = times.grid()
    late = 1 - _at_least(times.below(x) ** each, workers, rank)
    return float(x[0] + np.sum((late[1:] + late[:-1]) / 2 * np.diff(x)))


def expected_max(noise: Noise, workers: int, steps: int = 1) -> float:
    """E[max] over all workers: what a synchronous step takes, over its compute."""
    return expected_rank(noise, 1, 1, max(1, workers), steps)


@lru_cache(maxsize=4096)
def quantile_of_max(noise: Noise, workers: int, share: float) -> float:
    """The time that the slowest of all workers stays below in this share of steps."""
    if is_even(noise):
        return 1.0
    times = step_times(noise)
    x = times.grid()
    return float(np.interp(share, times.below(x) ** max(1, workers), x))


def _at_least(below: Floats, workers: int, rank: int) -> Floats:
    """The probability that at least `rank` of `workers` are below, each with this probability."""
    if rank == workers:
        return np.asarray(below**workers)
    numbers = np.arange(rank, workers + 1)
    ways = math.lgamma(workers + 1) - _lgamma(numbers + 1.0) - _lgamma(workers - numbers + 1.0)
    inside = np.clip(below, 1e-300, 1 - 1e-16)[:, None]
    terms = ways + numbers * np.log(inside) + (workers - numbers) * np.log1p(-inside)
    total: Floats = np.minimum(1.0, np.exp(terms).sum(axis=1))
    return total


_STEPS = 400
_SETTLE = 80  # steps before the pace is taken
_NUMBERS = 400_000  # draws at most
_SEED = 11


def _draws(noise: Noise, workers: int, each: int) -> Floats:
    """The times of (steps, workers), over the compute of a step."""
    steps = max(_SETTLE * 2, min(_STEPS, _NUMBERS // (workers * each)))
    random = np.random.default_rng(_SEED)
    shape = (steps, workers, each)
    width = math.sqrt(math.log1p(noise.jitter**2))
    times = np.exp(random.normal(-width * width / 2, width, shape))
    slow = random.random(shape) < noise.straggler_share
    slowest: Floats = (np.where(slow, noise.straggler_slowdown, 1.0) * times).max(axis=2)
    return slowest


def _corrected(pace: float, draws: Floats, noise: Noise, each: int) -> float:
    """What these draws have more or less than theirs: the maximum is known exactly."""
    own = float(draws.mean())
    most = float(draws.max(axis=1).mean())
    known_own = own_pace(noise, each)
    known_most = expected_max(noise, draws.shape[1] * each)
    if most <= own:
        return pace
    return known_own + (pace - own) / (most - own) * (known_most - known_own)


def _pace(finished: Floats) -> float:
    """Seconds a step, from the time at which each step was finished."""
    return float((finished[-1] - finished[_SETTLE]) / (len(finished) - 1 - _SETTLE))


@lru_cache(maxsize=1024)
def quorum_pace(noise: Noise, workers: int, quorum: int, each: int = 1) -> float:
    """Seconds a step over its compute, where the first `quorum` pushes make it."""
    if is_even(noise) or quorum >= workers:
        return expected_max(noise, workers * each)
    draws = _draws(noise, workers, each)
    ready = draws[0]  # when each worker finishes what it computes now
    is_late = np.zeros(workers, dtype=bool)  # what it computes now is of an earlier step
    ends = [0.0]
    for times in draws[1:]:
        pushes = np.where(is_late, ready + times, ready)
        end = float(np.partition(pushes, quorum - 1)[quorum - 1])
        counted = pushes <= end
        began = ready <= end
        ready = np.where(counted, end + times, np.where(began, pushes, ready))
        is_late = ~counted
        ends.append(end)
    return _pace(np.asarray(ends))


@lru_cache(maxsize=1024)
def staleness_pace(noise: Noise, workers: int, staleness: int, each: int = 1) -> float:
    """Seconds a step over its compute, where no worker is more than so many steps ahead."""
    if is_even(noise) or staleness == 0:
        return expected_max(noise, workers * each)
    draws = _draws(noise, workers, each)
    finished = np.zeros((len(draws) + 1, workers))
    for step, times in enumerate(draws):
        begin = finished[step]
        if step >= staleness:
            begin = np.maximum(begin, finished[step - staleness].max())
        finished[step + 1] = begin + times
    return _corrected(_pace(finished.mean(axis=1)), draws, noise, each)


@lru_cache(maxsize=256)
def neighbours_pace(noise: Noise, graph: str, workers: int, each: int = 1) -> float:
    """Seconds a step over its compute, where a worker waits for those that it hears."""
    if is_even(noise) or workers == 1:
        return own_pace(noise, each)
    # for every worker where its list begins, and all lists: whom it hears, itself included
    own = np.arange(workers)
    heard = []
    for src, dst in edges_for(graph, workers):
        sources = np.append(src, own)
        hears = np.append(dst, own)
        order = np.argsort(hears, kind="stable")
        heard.append((np.searchsorted(hears[order], own), sources[order]))
    draws = _draws(noise, workers, each)
    finished = np.zeros((len(draws) + 1, workers))
    for step, times in enumerate(draws):
        computed = finished[step] + times
        starts, order = heard[step % len(heard)]
        finished[step + 1] = np.maximum.reduceat(computed[order], starts)
    return _corrected(_pace(finished.mean(axis=1)), draws, noise, each)


@lru_cache(maxsize=1024)
def own_pace(noise: Noise, each: int = 1) -> float:
    """Seconds a step over its compute, where a replica waits for its own workers only."""
    if is_even(noise):
        return 1.0
    return step_times(noise).mean if each == 1 else expected_max(noise, each)


@lru_cache(maxsize=4096)
def queue_cycle_s(workers: int, alone_s: float, service_s: float, queues: int = 1) -> float:
    """Seconds from one request of a worker to its next, where all share one server.

    `alone_s` is what a worker does by itself, `service_s` what its request takes of the server, in
    each of several queues that follow each other.
    """
    if service_s <= 0:
        return alone_s
    queue = busy = 0.0
    cycle_s = alone_s + queues * service_s
    for number in range(1, workers + 1):
        waited_s = service_s * (1 + max(0.0, queue - busy / 2))
        cycle_s = max(alone_s + queues * waited_s, number * service_s)
        queue = number * (cycle_s - alone_s) / queues / cycle_s
        busy = min(1.0, number * service_s / cycle_s)
    return cycle_s
