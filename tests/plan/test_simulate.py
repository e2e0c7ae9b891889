from __future__ import annotations

import numpy as np
import pytest

from shoal.cluster import Noise
from shoal.cluster.presets import load_cluster
from shoal.observe.time_shares import time_shares
from shoal.plan.predict import PlanSettings, predict
from shoal.plan.simulator.step_tasks import StepWork, Unevenness, rank_grid
from shoal.plan.simulator.strategies import StepRun, simulate_step, simulate_strategy
from shoal.plan.sync_price import Agreeing
from shoal.plan.timeline import simulate
from shoal.plan.workloads.model_presets import transformer_named
from shoal.schedules.pipelines.catalog import build
from shoal.strategy.strategy import Layout
from tests.plan.sync_questions import ports
from tests.plan.test_timeline import ROWS, SCHEDULES

RATE = 1e9
WORK = StepWork((1.0,), (2.0,), gradient_bytes=(1e9,), parameter_bytes=(1e9,), update_s=0.1)


def run(
    agreeing: Agreeing,
    replicas: int = 4,
    work: StepWork = WORK,
    uneven: Unevenness | None = None,
    steps: int = 1,
) -> StepRun:
    grid = rank_grid(Layout(replicas, 1, work.stages))
    devices = grid.size + len(agreeing.servers)
    return simulate_step(work, agreeing, grid, ports(devices, RATE), uneven, steps)


def servers(count: int, **options: object) -> Agreeing:
    return Agreeing("servers", servers=tuple(range(4, 4 + count)), **options)  # type: ignore[arg-type]


def test_one_replica_computes_and_updates() -> None:
    alone = run(Agreeing(), replicas=1)
    assert alone.step_s == pytest.approx(3.1)
    kinds = [(span.kind, span.track) for span in alone.spans_by_rank[0]]
    assert kinds == [("forward", "main"), ("backward", "main"), ("update", "main"),
                     ("step", "steps")]  # fmt: skip


RING_S = 2 * 3 / 4  # of 1 GB over 4 ranks at 1 GB/s


@pytest.mark.parametrize(
    ("agreeing", "more_s"),
    [
        (Agreeing("all_reduce", is_overlapped=False), RING_S),
        (Agreeing("zero", is_overlapped=False), RING_S),  # it reduces and gathers
        (Agreeing("zero", stage=3, is_overlapped=False), RING_S),  # backward's gather is hidden
        # two nodes of two: half a trip inside, a ring of half the bytes between, half inside
        (Agreeing("all_reduce", is_overlapped=False, node_devices=2), 1 + 0.5),
        (servers(2, is_overlapped=False), 2 + 2 - 0.1),  # servers update
    ],
)
def test_what_does_not_overlap_comes_on_top(agreeing: Agreeing, more_s: float) -> None:
    assert run(agreeing).step_s == pytest.approx(3.1 + more_s)


def test_buckets_hide_behind_backward_but_for_the_last() -> None:
    """Of 1.5 s in 10 buckets, all but the last fit into the 2 s of backward."""
    hidden = run(Agreeing("all_reduce", buckets=10))
    assert hidden.step_s == pytest.approx(3.1 + 0.15)
    shares = time_shares(hidden.spans_by_rank[0])
    assert shares.exposed == pytest.approx(0.15 / 3.25, rel=1e-6)
    assert shares.hidden == pytest.approx(1.35 / 3.25, rel=1e-6)
    assert shares.idle == pytest.approx(0, abs=1e-9)


def test_a_server_takes_in_all_pushes_and_the_time_grows_with_workers() -> None:
    for replicas in (2, 4):
        found = run(
            Agreeing("servers", is_overlapped=False, servers=(replicas,), apply_s=0.5), replicas
        )
        assert found.step_s == pytest.approx(3.0 + replicas + 0.5 + replicas)


def test_async_and_staleness_do_not_wait_for_a_straggler() -> None:
    light = StepWork((1.0,), (2.0,))
    slow = Unevenness(slow={0: 4.0})

    def ends(agreeing: Agreeing) -> list[float]:
        """When each worker has done 6 steps."""
        return list(run(agreeing, work=light, uneven=slow, steps=6).rank_end_s[-1])

    assert ends(servers(1)) == pytest.approx([72] * 4)
    assert ends(servers(1, is_async=True)) == pytest.approx([72, 18, 18, 18])
    # at most 2 steps ahead: step 5 begins when the slow one has done its step 2
    assert ends(servers(1, staleness=2)) == pytest.approx([72, 39, 39, 39])
    # three of four suffice, and the slow one finds its quorum long complete
    assert ends(servers(1, quorum=3)) == pytest.approx([72, 18, 18, 18])


def test_gossip_waits_for_neighbors_alone() -> None:
    slow = Unevenness(slow={0: 2.0})
    found = run(Agreeing("gossip", graph="ring"), 6, StepWork((1.0,), (2.0,)), slow)
    assert found.rank_end_s[0] == pytest.approx((6, 6, 3, 3, 3, 6))


def test_local_sgd_averages_every_so_many_steps() -> None:
    found = run(Agreeing("average", every=4), steps=4)
    assert found.seconds == pytest.approx(4 * 3.1 + 1.5)


def test_simulated_pipelines_are_those_of_the_timeline() -> None:
    _, stages, microbatches, times, bubbles = ROWS[0]
    forward, backward, weight, transfer = vars(times).values()
    whole = backward + weight
    passes = ((forward,) * stages, (whole,) * stages, (weight,) * stages, microbatches)
    for name, bubble in zip(SCHEDULES, bubbles, strict=True):
        expected = simulate(build(name, stages, microbatches), times)
        found = run(Agreeing(), 1, StepWork(*passes, name, boundary_bytes=transfer * RATE))
        assert found.seconds == pytest.approx(expected.makespan, rel=1e-6)
        spans = [s for s in found.spans_by_rank[0] if s.kind in ("forward", "backward")]
        length = (max(s.end_ns for s in spans) - min(s.start_ns for s in spans)) / 1e9
        assert f"{1 - microbatches * (forward + whole) / length:.4f}" == bubble


def test_noise_has_a_seed() -> None:
    noise = Noise(jitter=0.1, straggler_share=0.2, straggler_slowdown=3.0)
    seconds = [run(Agreeing("all_reduce"), uneven=Unevenness(noise, seed)).seconds for seed in
               (1, 1, 2)]  # fmt: skip
    assert seconds[0] == seconds[1] != seconds[2]


def test_ranks_in_shoals_order() -> None:
    grid = rank_grid(Layout(replicas=2, tp=2, pp=3))
    assert np.array_equal(grid, np.arange(12).reshape(2, 3, 2))
    megatron = rank_grid(Layout(replicas=2, tp=2, pp=3), ("tp", "cp", "ep", "dp", "pp"))
    assert megatron[0].tolist() == [[0, 1], [4, 5], [8, 9]]


MODEL = transformer_named("layers=8,hidden=1024,heads=16,sequence=512")


@pytest.mark.parametrize(
    ("strategy", "workers", "batch", "near", "cluster"),
    [
        ("single", 1, 64, 1e-3, "dgx-a100"),
        ("ddp", 8, 64, 0.1, "dgx-a100"),
        ("ddp + tp(2) + pp(2)", 8, 64, 0.15, "dgx-a100"),
        ("hogwild", 4, 8, 0.02, "laptop"),  # batches in turns in both
        # as many servers as workers: a worker's own NIC is the narrowest
        ('ps(servers=4, mode="async")', 4, 32, 0.05, "ethernet-25"),
        ('ps(placement="workers", mode="async")', 4, 32, 0.05, "ethernet-25"),
    ],
)
def test_what_has_no_contention_takes_what_is_predicted(
    strategy: str, workers: int, batch: int, near: float, cluster: str
) -> None:
    question = (MODEL, load_cluster(cluster), strategy, workers, PlanSettings(batch))
    simulated_s = simulate_strategy(*question).step_s
    assert simulated_s == pytest.approx(predict(*question).step_s, rel=near)


@pytest.mark.parametrize("strategy", ["zero(3)", "gossip", "ps(staleness=1)", "localsgd(every=2)"])
def test_ways_that_differ_are_simulated_and_never_faster_than_one_worker(strategy: str) -> None:
    cluster = load_cluster("dgx-a100")
    together = simulate_strategy(MODEL, cluster, strategy, 4, PlanSettings(32)).step_s
    alone = simulate_strategy(MODEL, cluster, "single", 1, PlanSettings(8)).step_s
    assert together >= alone * (0.9 if strategy == "zero(3)" else 0.999)  # it shares updates


def test_many_micro_batches_are_added_and_not_simulated() -> None:
    question = (MODEL, load_cluster("dgx-a100"), "pp(2)", 2, PlanSettings(64, microbatch=1))
    found = simulate_strategy(*question)
    assert found.left_out == 64 - 6
    assert found.step_s == pytest.approx(predict(*question).step_s, rel=0.1)
