"""Whole rehearsals: real strategies, servers and jobs in virtual time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.cluster.hardware import LinkSpec
from shoal.cluster.presets import load_cluster
from shoal.errors import BadInput
from shoal.observe.comparison import ComparedRun, outcome_from
from shoal.plan.step.slow_workers import Unevenness
from shoal.rehearse.world import Train
from shoal.train.job import Job
from tests.conftest import World
from tests.jobs import after_training, weights_of
from tests.models import mlp, samples
from tests.rehearse.worlds import TIMES, rehearsed

SGD = partial(torch.optim.SGD, lr=0.1)
DATA = samples(48)


def training(
    epochs: int = 2, data: TensorDataset = DATA, batch_size: int = 16, **options: Any
) -> Train:
    """A training function that returns its weights."""

    def train(job: Job) -> torch.Tensor:
        step = job.step(mlp(), F.cross_entropy, optimizer=SGD, **options)
        for batch in job.batches(data, batch_size=batch_size, epochs=epochs):
            job.log(loss=step(batch))
        return step.flat.data.clone()

    return train


def losses_of(strategy: str, workers: int, **options: Any) -> list[float]:
    found: list[float] = rehearsed(training(), strategy, workers, **options).reports[0]["losses"]
    return found


SYNCHRONOUS = [
    *("ddp", "zero(1)", "zero(3)", 'gossip(graph="complete")', 'mapreduce(batch="mini")'),
    *("ps", "ps(servers=2)", 'ps(placement="workers")', 'ps(placement="rank0")', "tp(2)", "pp(2)"),
    *("ddp + pp(2)", "ddp + tp(2)", 'ddp(algorithm="tree")', "localsgd(every=1)"),
    *("ddp(elastic=True)", "zero(3, elastic=True)", "ps(replicas=2)"),
]


@pytest.mark.product
@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_synchronous_strategies_equal_one_device(strategy: str, workers: int) -> None:
    if workers == 2 and "+" in strategy:
        pytest.skip("one replica")
    assert losses_of(strategy, workers) == pytest.approx(losses_of("single", 1), rel=1e-4)


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["ddp", "ps", "zero(1)", "ddp + pp(2)"])
def test_sixty_four_workers_equal_one_device(strategy: str) -> None:
    train = training(data=samples(192), batch_size=96)
    losses = [
        rehearsed(train, one, workers).reports[0]["losses"]
        for one, workers in ((strategy, 64), ("single", 1))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("strategy", ["ddp", 'ps(placement="rank0")', "zero(1)"])
@pytest.mark.parametrize("workers", [2, 4, pytest.param(64, marks=pytest.mark.whole)])
def test_exact_has_the_bits_of_a_real_run(world: World, strategy: str, workers: int) -> None:
    data, batch = (samples(128), 64) if workers == 64 else (DATA, 16)
    options: dict[str, Any] = {"exact": True, "microbatches": max(4, workers)}
    options |= {"data": data, "batch_size": batch}
    real = after_training(world, workers, strategy, weights_of, epochs=2, steps=None, **options)
    virtual = rehearsed(training(**options), strategy, workers, seed=3).results
    for one, other in zip(real, virtual, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "strategy",
    ['ps(mode="async")', "ps(quorum=3)", 'gossip(mode="async")', "hogwild", "ps(staleness=1)"],
)
def test_the_same_rehearsal_gives_the_same_bits_and_seconds(strategy: str) -> None:
    from shoal.cluster import Noise

    uneven = Unevenness(Noise(jitter=0.2), seed=5, slow={3: 2.0})
    runs = [rehearsed(training(3), strategy, 4, uneven=uneven) for _ in range(2)]
    first, second = ([(r["losses"], r["loss_s"]) for r in run.reports] for run in runs)
    assert first == second
    for one, other in zip(runs[0].results, runs[1].results, strict=True):
        assert torch.equal(one, other)
    assert runs[0].spans == runs[1].spans


def test_steps_that_a_straggler_skips_are_counted_and_are_not_its_speed() -> None:
    strategy = 'ps(mode="async")'
    done = rehearsed(training(10), strategy, 2, uneven=Unevenness(slow={1: 8.0}))
    pushed = [len(report["losses"]) - report["sync"][0]["skipped"] for report in done.reports]
    assert pushed[0] == 30 and pushed[1] < 20
    for report in done.reports:  # 8 of the 16 samples of a batch are on each worker
        assert report["samples_per_s"] == pytest.approx(8 * report["steps_per_s"])
    found = outcome_from(ComparedRun(0, strategy, 2, ""), done.reports, done.spans, None, ())
    assert found.dropped == 0 and found.skipped == 30 - pushed[1]
    assert found.steps_per_s == fmean(report["steps_per_s"] for report in done.reports)


@pytest.mark.parametrize(
    "strategy", ['gossip(mode="async")', 'gossip(graph="one-peer", mode="async")']
)
def test_asynchronous_gossip_between_hosts_takes_the_time_of_its_messages(strategy: str) -> None:
    cluster = load_cluster("dgx-a100")
    cluster = replace(cluster, node=replace(cluster.node, devices=2))
    slow = replace(cluster, node=replace(cluster.node, nic=LinkSpec("slow", 1e6, 1e-3)))
    runs = [rehearsed(training(), strategy, 4, cluster=c) for c in (cluster, cluster, slow)]
    first, second, slower = ([(r["losses"], r["loss_s"]) for r in run.reports] for run in runs)
    assert first == second != slower
    assert runs[2].seconds > runs[0].seconds + 6 * 1e-3
    for run in runs:
        assert all(report["steps"] == 6 for report in run.reports)


def test_time_is_that_of_the_work() -> None:
    """4 + 8 ms for 16 samples, 1 ms for an update."""
    alone = rehearsed(training(1), "single", 1)
    assert alone.seconds == pytest.approx(3 * 0.013, rel=1e-6)
    halves = rehearsed(training(1), "ddp", 2)
    assert 3 * 0.007 < halves.seconds < 3 * 0.0075


def test_a_synchronous_step_waits_for_the_slow_worker_and_an_asynchronous_one_does_not() -> None:
    uneven = Unevenness(slow={1: 4.0})

    def ends(strategy: str) -> list[float]:
        found = rehearsed(training(), strategy, 2, uneven=uneven)
        return [report["loss_s"][-1] for report in found.reports]

    fast_s, slow_s = ends("ps")
    assert fast_s == pytest.approx(slow_s, rel=0.05)
    fast_s, slow_s = ends('ps(mode="async")')
    assert slow_s > 2 * fast_s


def test_a_slow_server_applies_updates_slowly() -> None:
    usual = rehearsed(training(), "ps", 2).seconds
    slow = rehearsed(training(), "ps", 2, slow_servers={0: 5.0}).seconds
    assert slow - usual == pytest.approx(6 * 4 * TIMES.apply_s, rel=1e-3)


def test_servers_count_what_was_dropped_and_what_was_stale() -> None:
    uneven = Unevenness(slow={3: 4.0})
    dropped = rehearsed(training(4), "ps(quorum=3)", 4, uneven=uneven)
    servers = dropped.reports[0]["sync"][0]["servers"][0]["workers"]
    assert sum(mine["dropped"] for mine in servers.values()) > 0
    stale = rehearsed(training(4), 'ps(mode="async")', 4, uneven=uneven)
    missed = stale.reports[0]["sync"][0]["servers"][0]["missed_updates"]
    behind = [int(number) for number, count in missed.items() for _ in range(count)]
    assert fmean(behind) > 1


def test_spans_have_waits_by_name_in_virtual_time() -> None:
    from shoal.observe.time_shares import all_shares

    found = rehearsed(training(), "ddp", 2, uneven=Unevenness(slow={1: 3.0}))
    shares = all_shares(found.spans)
    assert shares[1].computing > 0.9
    assert shares[0].computing < 0.5


def test_buckets_leave_while_backward_runs() -> None:
    """Two buckets: the first one is sent before the end of backward."""
    found = rehearsed(training(1), "ddp(bucket_mb=0.0001)", 2)
    spans = found.spans[0]
    backward = next(span for span in spans if span.kind == "backward")
    first = next(s for s in spans if s.kind == "reduce" and s.start_ns > backward.start_ns)
    assert first.detail.startswith("all_reduce") and first.end_ns < backward.end_ns


def test_a_bucket_leaves_at_the_moment_that_was_measured() -> None:
    times = replace(TIMES, ready=((1e-6, 0.25), (1.0, 0.25)))
    found = rehearsed(training(1), "ddp(bucket_mb=0.0001)", 2, times=times)
    spans = found.spans[0]
    backward = next(span for span in spans if span.kind == "backward")
    first = next(s for s in spans if s.kind == "reduce" and s.start_ns > backward.start_ns)
    quarter_ns = (backward.end_ns - backward.start_ns) / 4
    assert first.start_ns - backward.start_ns == pytest.approx(quarter_ns, rel=1e-3)


def test_several_nodes_are_joined_by_their_network() -> None:
    inside = rehearsed(training(1), "ps(servers=2)", 8)
    beyond = rehearsed(training(1), "ps(servers=2)", 16)
    assert not any("InfiniBand" in name for name in inside.link_bytes)
    assert any("InfiniBand" in name for name in beyond.link_bytes)


def test_what_cannot_be_rehearsed_is_refused() -> None:
    with pytest.raises(BadInput, match="on several"):
        rehearsed(training(), "hogwild", 16)


def test_a_model_that_all_workers_would_share_is_refused() -> None:
    model: nn.Module = mlp()

    def train(job: Job) -> None:
        job.step(model, F.cross_entropy, optimizer=SGD)

    with pytest.raises(BadInput, match="make it inside"):
        rehearsed(train, "ddp", 2)


def test_times_are_those_of_the_stages() -> None:
    assert TIMES.seconds("backward", "I0", 0) == pytest.approx(0.004)
    assert TIMES.seconds("backward", "B0", 0) == pytest.approx(0.008)
