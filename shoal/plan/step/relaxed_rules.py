"""Steps of workers that do not all wait for each other: the pace of rules without a closed form.

Quorum, bounded staleness and gossip with neighbours are recursions over the times at which workers
finish. They are followed here on fixed draws, a few hundred steps of all workers at once, so the
same question always has the same answer; its own error is about 1%.

    quorum k       the next step begins with the k-th push; a late worker begins it later
    staleness s    a step begins when every worker has finished the one that is s before it
    neighbours     a step begins when all that a worker hears have finished the one before

Many workers in front of servers are a closed queue: each computes, then asks, and the servers
answer one at a time. Mean-value analysis counts those in front of an arriving worker; a request in
service is on the average half done.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shoal.cluster.cluster import Noise
from shoal.plan.step.stragglers import Floats, expected_max, is_even, step_times
from shoal.schedules.mixing import mixing_for

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
    steps = len(finished) - 1 - _SETTLE
    return float((finished[-1] - finished[_SETTLE]) / steps)


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
    heard = [_heard(matrix) for matrix in mixing_for(graph, workers).matrices]
    draws = _draws(noise, workers, each)
    finished = np.zeros((len(draws) + 1, workers))
    for step, times in enumerate(draws):
        computed = finished[step] + times
        starts, order = heard[step % len(heard)]
        finished[step + 1] = np.maximum.reduceat(computed[order], starts)
    return _corrected(_pace(finished.mean(axis=1)), draws, noise, each)


def _heard(matrix: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For every worker where its list begins, and all lists: whom it hears, itself included."""
    rows, columns = np.nonzero(matrix + np.eye(len(matrix)))
    return np.searchsorted(rows, np.arange(len(matrix))), columns


@lru_cache(maxsize=1024)
def own_pace(noise: Noise, each: int = 1) -> float:
    """Seconds a step over its compute, where a replica waits for its own workers only."""
    if is_even(noise):
        return 1.0
    return step_times(noise).mean if each == 1 else expected_max(noise, each)


@lru_cache(maxsize=4096)
def queue_cycle_s(workers: int, alone_s: float, service_s: float) -> float:
    """Seconds from one request of a worker to its next, where all share one server.

    `alone_s` is what a worker does by itself, `service_s` what its request takes of the server.
    """
    if service_s <= 0:
        return alone_s
    queue = 0.0
    busy = 0.0
    cycle_s = alone_s + service_s
    for number in range(1, workers + 1):
        waited_s = service_s * (1 + max(0.0, queue - busy / 2))
        cycle_s = max(alone_s + waited_s, number * service_s)
        queue = number * (cycle_s - alone_s) / cycle_s
        busy = min(1.0, number * service_s / cycle_s)
    return cycle_s
