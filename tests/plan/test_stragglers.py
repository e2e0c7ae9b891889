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
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.step.collective_time import MEGATRON_ORDER, SHOAL_ORDER
from shoal.plan.step.slow_workers import without
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


WORKLOAD = transformer_named("layers=8,hidden=2048,heads=16")
USUAL = PlanSettings(64, microbatch=2)
QUIET = replace(load_cluster("dgx-a100").of_size(8), noise=Noise())
APART = replace(QUIET, node=replace(QUIET.node, devices=1), nodes=8)  # where no host is shared
PREDICTOR, BETWEEN_HOSTS = Predictor(WORKLOAD, QUIET), Predictor(WORKLOAD, APART)


def step_s(
    strategy: str, *slow: tuple[int, float], on: Predictor = PREDICTOR, **settings: int
) -> float:
    asked = replace(USUAL, slow=slow, **settings)
    return on.predict(as_strategy(strategy), 8, asked).step_s


@pytest.mark.parametrize("strategy", ["ddp + tp(2)", "ddp + pp(2)", "ddp", "localsgd(every=4)"])
def test_a_slow_worker_holds_up_its_stage_and_all_others(strategy: str) -> None:
    stage = ((0, 4.0), (1, 4.0)) if "tp" in strategy else ((1, 4.0),)
    slow_s = step_s(strategy, (1, 4.0))
    assert slow_s == step_s(strategy, *stage) > step_s(strategy, (1, 2.0)) > step_s(strategy)
    all_s = step_s(strategy, *((rank, 4.0) for rank in range(8)))
    assert slow_s == pytest.approx(all_s, rel=0.01 if "tp" in strategy else 0.1)


def test_a_slow_stage_computes_on_while_the_others_wait_for_it() -> None:
    """With many micro-batches a pipeline has the pace of its slowest stage, wherever it is."""
    several = {"microbatch": 1, "batch": 128}
    even_s = step_s("pp(8)", **several)
    last_s = step_s("pp(8)", (7, 4.0), **several)  # which has the head, and is the slowest
    assert last_s / even_s == pytest.approx(4 * 128 / (128 + 7), rel=0.1)
    for rank in (0, 3):
        assert even_s < step_s("pp(8)", (rank, 4.0), **several) < last_s


def test_who_does_not_wait_for_a_slow_worker_goes_on() -> None:
    """The mean pace of eight of which one is four times slower is 7.25 / 8."""
    gossip, hogwild = 'gossip(graph="ring", mode="async")', "hogwild"
    cpu = replace(APART, node=replace(APART.node, devices=8, memory_bytes_per_s=1e15), nodes=1)
    for strategy, on in ((gossip, BETWEEN_HOSTS), (hogwild, Predictor(WORKLOAD, cpu))):
        even_s, slow_s = step_s(strategy, on=on), step_s(strategy, (5, 4.0), on=on)
        assert 1.03 * even_s < slow_s < 8 / 7.25 * even_s
    relaxed = 'ps(mode="async", placement="workers")'
    even_s, slow_s = step_s(relaxed, on=BETWEEN_HOSTS), step_s(relaxed, (5, 4.0), on=BETWEEN_HOSTS)
    assert even_s < slow_s < 8 / 7.25 * even_s


@pytest.mark.parametrize("strategy", ['gossip(graph="ring")', "ps(staleness=2)"])
def test_who_waits_for_some_has_the_pace_of_the_slowest_in_the_end(strategy: str) -> None:
    late_s = step_s(strategy, (5, 4.0)) - step_s(strategy)
    assert late_s == pytest.approx(step_s("ddp", (5, 4.0)) - step_s("ddp"), rel=0.1)


def test_a_quorum_waits_for_slow_workers_only_if_it_needs_them() -> None:
    even_s = step_s("ps(quorum=6)")
    assert step_s("ps(quorum=6)", (1, 4.0), (2, 4.0)) == pytest.approx(even_s)
    of_two = step_s("ps(quorum=6)", (1, 4.0), (2, 4.0), (3, 2.0))
    assert even_s < of_two < step_s("ps(quorum=6)", (1, 4.0), (2, 4.0), (3, 4.0))


def test_what_others_push_is_there_before_the_push_of_a_slow_worker() -> None:
    even_s, slow_s = (step_s("ps", *slow, on=BETWEEN_HOSTS) for slow in ((), ((1, 4.0),)))
    late_s = step_s("ddp", (1, 4.0), on=BETWEEN_HOSTS) - step_s("ddp", on=BETWEEN_HOSTS)
    assert slow_s < even_s + late_s


def test_replicas_of_lost_workers_are_missing_and_the_others_do_the_whole_batch() -> None:
    layout = as_strategy("ddp + tp(2)").layout(8)
    left, slow = without({2, 3}, layout, ((1, 2.0), (2, 3.0), (7, 4.0)), SHOAL_ORDER)
    assert left == layout._replace(replicas=3)
    assert slow == ((1, 2.0), (5, 4.0))  # worker 7 is the sixth of those that are left
    inside = without({2}, layout, ((7, 4.0),), MEGATRON_ORDER)
    assert inside == (left, ((5, 4.0),))
    with pytest.raises(BadInput, match="no replica is left"):
        without({0, 2, 4, 7}, layout, (), SHOAL_ORDER)
    value = as_strategy("ddp + tp(2)")
    fewer_s = PREDICTOR.predict(value, left.workers, replace(USUAL, batch=48), left).step_s
    assert fewer_s < step_s("ddp + tp(2)", batch=64) * 1.01
