from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shoal.cluster import Noise
from shoal.cluster.presets import load_cluster
from shoal.observe.time_shares import time_shares, write_chrome
from shoal.plan.predict import PlanSettings, predict
from shoal.plan.simulator.step_tasks import StepWork, Unevenness, rank_grid
from shoal.plan.simulator.strategies import StepRun, simulate_step, simulate_strategy
from shoal.plan.sync_price import Agreeing
from shoal.plan.timeline import Times, simulate
from shoal.plan.workloads.model_presets import named_workload
from shoal.schedules.pipelines.catalog import build
from shoal.strategy.strategy import Layout
from tests.plan.sync_questions import ports
from tests.plan.test_timeline import ROWS

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


def test_an_all_reduce_that_does_not_overlap_comes_on_top() -> None:
    ring_s = 2 * 3 / 4  # of 1 GB over 4 ranks at 1 GB/s
    assert run(Agreeing("all_reduce", is_overlapped=False)).step_s == pytest.approx(3.1 + ring_s)


def test_buckets_hide_behind_backward_but_for_the_last() -> None:
    """Of 1.5 s in 10 buckets, all but the last fit into the 2 s of backward."""
    hidden = run(Agreeing("all_reduce", buckets=10))
    assert hidden.step_s == pytest.approx(3.1 + 0.15)
    shares = time_shares(hidden.spans_by_rank[0])
    assert shares.exposed == pytest.approx(0.15 / 3.25, rel=1e-6)
    assert shares.hidden == pytest.approx(1.35 / 3.25, rel=1e-6)
    assert shares.idle == pytest.approx(0, abs=1e-9)


def test_zero_reduces_and_gathers() -> None:
    half_s = 3 / 4
    assert run(Agreeing("zero", is_overlapped=False)).step_s == pytest.approx(3.1 + 2 * half_s)
    whole = run(Agreeing("zero", stage=3, is_overlapped=False)).step_s
    assert whole == pytest.approx(3.1 + 2 * half_s)  # the gather for backward is hidden


def test_groups_agree_inside_nodes_first() -> None:
    """Two nodes of two: half a trip inside, a ring of half the bytes between, half inside."""
    inside_s = 2 * 1 / 2
    between_s = 2 * 1 / 2 * 0.5
    found = run(Agreeing("all_reduce", is_overlapped=False, node_devices=2)).step_s
    assert found == pytest.approx(3.1 + inside_s + between_s)


def test_a_server_takes_in_all_pushes_and_the_time_grows_with_workers() -> None:
    for replicas in (2, 4):
        found = run(
            Agreeing("servers", is_overlapped=False, servers=(replicas,), apply_s=0.5), replicas
        )
        assert found.step_s == pytest.approx(3.0 + replicas + 0.5 + replicas)
    split = run(servers(2, is_overlapped=False))
    assert split.step_s == pytest.approx(3.0 + 2 + 2)


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
    row = ROWS[0]
    work = StepWork(
        (row.forward,) * row.stages,
        (row.backward + row.weight,) * row.stages,
        (row.weight,) * row.stages,
        row.microbatches,
        boundary_bytes=row.transfer * RATE,
    )
    for name in ("1f1b", "zb-h1", "zb-h2"):
        times = Times(row.forward, row.backward, row.weight, row.transfer)
        expected = simulate(build(name, row.stages, row.microbatches), times)
        scheduled = StepWork(**{**vars(work), "schedule": name})
        found = run(Agreeing(), 1, scheduled)
        assert found.seconds == pytest.approx(expected.makespan, rel=1e-6)
        spans = [s for s in found.spans_by_rank[0] if s.kind in ("forward", "backward")]
        length = (max(s.end_ns for s in spans) - min(s.start_ns for s in spans)) / 1e9
        ideal = row.microbatches * (row.forward + row.backward + row.weight)
        assert f"{1 - ideal / length:.4f}" == row.bubbles[name]


def test_noise_has_a_seed() -> None:
    noise = Noise(jitter=0.1, straggler_share=0.2, straggler_slowdown=3.0)
    seconds = [run(Agreeing("all_reduce"), uneven=Unevenness(noise, seed)).seconds for seed in
               (1, 1, 2)]  # fmt: skip
    assert seconds[0] == seconds[1] != seconds[2]


def test_the_trace_is_that_of_a_run(tmp_path: Path) -> None:
    found = run(Agreeing("all_reduce", buckets=4), 2)
    write_chrome(found.spans_by_rank, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {e["name"] for e in events if e["ph"] == "X"} == {
        "forward", "backward", "reduce", "wait", "update", "step"}  # fmt: skip


def test_ranks_in_shoals_order() -> None:
    grid = rank_grid(Layout(replicas=2, tp=2, pp=3))
    assert np.array_equal(grid, np.arange(12).reshape(2, 3, 2))
    megatron = rank_grid(Layout(replicas=2, tp=2, pp=3), ("tp", "cp", "ep", "dp", "pp"))
    assert megatron[0].tolist() == [[0, 1], [4, 5], [8, 9]]


MODEL = named_workload(None, "layers=8,hidden=1024,heads=16,sequence=512")
CLUSTER = load_cluster("dgx-a100")


def seconds(strategy: str, workers: int = 8, batch: int = 64) -> tuple[float, float]:
    """Simulated and in closed form."""
    assert MODEL is not None
    settings = PlanSettings(batch)
    closed_s = predict(MODEL, CLUSTER, strategy, workers, settings).step_s
    return simulate_strategy(MODEL, CLUSTER, strategy, workers, settings).step_s, closed_s


def test_what_has_no_contention_takes_what_is_predicted() -> None:
    simulated_s, closed_s = seconds("single", workers=1)
    assert simulated_s == pytest.approx(closed_s, rel=1e-3)
    simulated_s, closed_s = seconds("ddp")
    assert simulated_s == pytest.approx(closed_s, rel=0.1)
    simulated_s, closed_s = seconds("ddp + tp(2) + pp(2)")
    assert simulated_s == pytest.approx(closed_s, rel=0.15)


@pytest.mark.parametrize("strategy", ["zero(3)", "gossip", "ps(staleness=1)", "localsgd(every=2)"])
def test_ways_that_differ_are_simulated_and_never_faster_than_one_worker(strategy: str) -> None:
    simulated_s, _ = seconds(strategy, workers=4, batch=32)
    alone_s, _ = seconds("single", workers=1, batch=8)
    assert simulated_s >= alone_s * (0.9 if strategy == "zero(3)" else 0.999)  # it shares updates


def test_many_micro_batches_are_added_and_not_simulated() -> None:
    assert MODEL is not None
    settings = PlanSettings(64, microbatch=1)
    found = simulate_strategy(MODEL, CLUSTER, "pp(2)", 2, settings)
    assert found.left_out == 64 - 6
    closed_s = predict(MODEL, CLUSTER, "pp(2)", 2, settings).step_s
    assert found.step_s == pytest.approx(closed_s, rel=0.1)


def test_hogwild_takes_batches_in_turns_in_both() -> None:
    assert MODEL is not None
    cores = load_cluster("laptop")
    settings = PlanSettings(8)
    closed_s = predict(MODEL, cores, "hogwild", 4, settings).step_s
    found = simulate_strategy(MODEL, cores, "hogwild", 4, settings)
    assert found.step_s == pytest.approx(closed_s, rel=0.02)


@pytest.mark.parametrize("options", ["servers=4", 'placement="workers"'])
def test_asynchronous_servers_on_a_network_take_what_is_predicted(options: str) -> None:
    """As many servers as workers: a worker's own NIC is the narrowest."""
    assert MODEL is not None
    network = load_cluster("ethernet-25")
    strategy = f'ps({options}, mode="async")'
    settings = PlanSettings(32)
    closed_s = predict(MODEL, network, strategy, 4, settings).step_s
    found = simulate_strategy(MODEL, network, strategy, 4, settings, steps=4)
    assert found.step_s == pytest.approx(closed_s, rel=0.05)
