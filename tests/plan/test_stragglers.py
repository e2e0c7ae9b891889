"""The time of unequal workers, against draws of their times and against following the rules."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

import numpy as np
import pytest

from shoal.cluster import Noise
from shoal.cluster.presets import load_cluster
from shoal.errors import BadInput
from shoal.plan.predict import PlanSettings, Predictor, predict
from shoal.plan.simulator.step_tasks import Unevenness
from shoal.plan.simulator.strategies import simulate_strategy
from shoal.plan.step.stragglers import (
    Floats,
    expected_max,
    expected_rank,
    neighbours_pace,
    own_pace,
    queue_cycle_s,
    quorum_pace,
    staleness_pace,
    step_times,
)
from shoal.plan.workloads.model_presets import transformer_named
from shoal.strategy.strategy import as_strategy

JITTER = Noise(0.2)
STRAGGLERS = Noise(0.05, 0.1, 3.0)


def draw(noise: Noise, shape: tuple[int, ...], seed: int = 5) -> Floats:
    random = np.random.default_rng(seed)
    width = math.sqrt(math.log1p(noise.jitter**2))
    times = np.exp(random.normal(-width * width / 2, width, shape))
    slow = random.random(shape) < noise.straggler_share
    found: Floats = times * np.where(slow, noise.straggler_slowdown, 1.0)
    return found


@pytest.mark.parametrize("noise", [JITTER, STRAGGLERS])
@pytest.mark.parametrize("workers", [2, 16])
def test_order_statistics_are_those_of_drawn_times(noise: Noise, workers: int) -> None:
    drawn = np.sort(draw(noise, (20_000, workers)), axis=1).mean(axis=0)
    expected = [expected_rank(noise, workers, rank) for rank in range(1, workers + 1)]
    assert expected == pytest.approx(list(drawn), rel=0.02)
    assert expected[-1] == pytest.approx(expected_max(noise, workers))


def test_the_maximum_of_a_mean_of_steps_shrinks_with_their_number() -> None:
    drawn = draw(STRAGGLERS, (4000, 8, 16)).mean(axis=1).max(axis=1).mean()
    assert expected_max(STRAGGLERS, 16, steps=8) == pytest.approx(drawn, rel=0.02)
    # a replica is as slow as its slowest worker
    assert expected_rank(JITTER, 4, 4, each=3) == pytest.approx(expected_max(JITTER, 12))


def test_equal_workers_take_their_compute_time() -> None:
    quiet = Noise()
    assert expected_max(quiet, 64) == quorum_pace(quiet, 8, 4) == own_pace(quiet) == 1.0
    assert staleness_pace(quiet, 8, 2) == neighbours_pace(quiet, "ring", 8) == 1.0


def followed_quorum(noise: Noise, workers: int, quorum: int, steps: int) -> float:
    """Push by push, from the events of a queue."""
    times = iter(draw(noise, (steps * workers * 2,), seed=9))
    events = [(float(next(times)), worker, 0) for worker in range(workers)]
    heapq.heapify(events)
    version = 0
    waiting: list[int] = []
    now = 0.0
    while version < steps:
        now, worker, of = heapq.heappop(events)
        waiting += [worker] * (of == version)
        begin = [worker] if of < version else []  # too late for its step: begins the present one
        if len(waiting) == quorum:
            version, begin, waiting = version + 1, waiting, []
        for each in begin:
            heapq.heappush(events, (now + float(next(times)), each, version))
    return now / steps


@pytest.mark.parametrize("quorum", [4, 6, 7])
def test_quorum_is_the_pace_of_events(quorum: int) -> None:
    followed = followed_quorum(STRAGGLERS, 8, quorum, 1500)
    assert quorum_pace(STRAGGLERS, 8, quorum) == pytest.approx(followed, rel=0.05)


def test_rules_that_wait_less_are_faster() -> None:
    paces = [staleness_pace(STRAGGLERS, 16, s) for s in (1, 2, 4, 8)]
    assert paces == sorted(paces, reverse=True)
    assert own_pace(STRAGGLERS) < paces[-1] < paces[0] < expected_max(STRAGGLERS, 16)
    for all_wait in (staleness_pace(STRAGGLERS, 16, 0), quorum_pace(STRAGGLERS, 16, 16)):
        assert all_wait == pytest.approx(expected_max(STRAGGLERS, 16), rel=0.02)


def test_gossip_waits_for_neighbours_less_than_for_all() -> None:
    ring = neighbours_pace(JITTER, "ring", 16)
    assert step_times(JITTER).mean < ring < expected_max(JITTER, 16)
    complete = neighbours_pace(JITTER, "complete", 16)
    assert complete == pytest.approx(expected_max(JITTER, 16), rel=0.02)


def followed_queue(workers: int, alone_s: float, service_s: float, noise: Noise) -> float:
    times = iter(draw(noise, (4000,), seed=3))
    arrivals = [(alone_s * float(next(times)), worker) for worker in range(workers)]
    heapq.heapify(arrivals)
    free = 0.0
    for _ in range(3000):
        at, worker = heapq.heappop(arrivals)
        free = max(free, at) + service_s
        heapq.heappush(arrivals, (free + alone_s * float(next(times)), worker))
    return free * workers / 3000


@pytest.mark.parametrize("service_s", [0.01, 0.05, 0.1, 0.2, 0.5])
def test_asynchronous_workers_go_at_their_pace_until_servers_are_busy(service_s: float) -> None:
    followed = followed_queue(8, 1.0, service_s, Noise(0.3))
    assert queue_cycle_s(8, 1.0, service_s) == pytest.approx(followed, rel=0.12)
    assert queue_cycle_s(8, 1.0, service_s) >= max(1 + service_s, 8 * service_s)


@pytest.mark.parametrize("strategy", ["ddp + tp(2)", "ddp + pp(2)", "ddp"])
def test_a_slow_worker_holds_up_its_stage_and_all_others(strategy: str) -> None:
    """As a simulation of the same step, and as if all workers of its stage were slow."""
    workload = transformer_named("layers=8,hidden=2048,heads=16")
    cluster = replace(load_cluster("dgx-a100").of_size(8), noise=Noise())
    usual = PlanSettings(64, microbatch=2)
    predictor = Predictor(workload, cluster)
    value = as_strategy(strategy)

    def step_s(slow: tuple[tuple[int, float], ...]) -> float:
        return predictor.predict(value, 8, replace(usual, slow=slow)).step_s

    stage = ((0, 4.0), (1, 4.0)) if "tp" in strategy else ((1, 4.0),)
    assert step_s(((1, 4.0),)) == step_s(stage) > step_s(((1, 2.0),)) > step_s(())
    uneven = Unevenness(slow=dict(stage))
    simulated = simulate_strategy(workload, cluster, value, 8, usual, uneven, 6)
    assert step_s(stage) == pytest.approx(simulated.step_s, rel=0.05)


def test_unlike_workers_of_a_stage_are_not_simulated() -> None:
    workload = transformer_named("layers=8,hidden=2048,heads=16")
    cluster = load_cluster("dgx-a100")
    for uneven in (Unevenness(slow={1: 4.0}), Unevenness(Noise(jitter=0.1), seed=1)):
        with pytest.raises(BadInput, match="shoal predict --slow and shoal rehearse --slow"):
            simulate_strategy(workload, cluster, "ddp + tp(2)", 4, PlanSettings(64), uneven)
    slow = PlanSettings(64, slow=((1, 4.0),))
    with pytest.raises(BadInput, match="shoal rehearse --slow"):
        predict(workload, cluster, 'ps(mode="async")', 4, slow)
