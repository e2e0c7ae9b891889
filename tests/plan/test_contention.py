"""Collectives in segments: what overlaps, and what does not."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.host_schedules import PLAIN, WITH_RACKS, crossed, host_schedule
from benchmarks.segments import simulate_in_segments
from shoal.cluster import Cluster, Node, Noise
from shoal.cluster.hardware import LinkSpec
from shoal.cluster.presets import load_cluster
from shoal.observe.time_shares import time_shares
from shoal.plan.predict import PlanSettings, predict
from shoal.plan.simulator.contention import AT_RANDOM, ClusterNetwork, explain_racks, hierarchical
from shoal.plan.simulator.messages import (
    FlowNetwork,
    Longs,
    MessageNetwork,
    Routes,
    max_min_rates,
    simulate_collective,
)
from shoal.plan.simulator.step_tasks import StepWork, Unevenness, rank_grid
from shoal.plan.simulator.strategies import StepRun, simulate_step, simulate_strategy
from shoal.plan.sync_price import Agreeing
from shoal.plan.timeline import simulate
from shoal.plan.workloads.model_presets import transformer_named
from shoal.schedules.collectives.catalog import CATALOG, build
from shoal.schedules.collectives.cost import Link, price
from shoal.schedules.collectives.proof import prove
from shoal.schedules.pipelines.catalog import build as build_pipeline
from shoal.strategy.strategy import Layout
from tests.plan.test_sync_price import DEVICE, by_rank, ports
from tests.plan.test_timeline import ROWS, SCHEDULES
from tests.products import few_or_all

GB = 1_000_000_000


def test_on_racks_order_and_levels_count_by_what_both_say() -> None:
    network = ClusterNetwork(load_cluster("rack-1-4"), 32)
    prices = network.price_all("all_reduce", GB)
    found = {(one.algorithm, one.order): one for one in prices}
    ring = found["ring", "contiguous"]
    shuffled = found["ring", AT_RANDOM]
    levels = found["hierarchical", "contiguous"]
    assert ring.seconds == pytest.approx(ring.alpha_beta_s, rel=1e-3)  # needs no help
    assert ring.seconds < levels.seconds < shuffled.seconds
    by_simulation = shuffled.seconds / levels.seconds
    assert by_simulation == pytest.approx(shuffled.closed_form_s / levels.closed_form_s, rel=1e-3)
    assert shuffled.bound.startswith("uplink") and not ring.bound.startswith("uplink")

    flows = network.crossings(AT_RANDOM)
    uplink = network.cluster.uplink_bytes_per_s
    rounds = 2 * 31
    seconds = rounds * (31e-6 + GB / 32 * flows / uplink)
    assert shuffled.seconds == pytest.approx(seconds, rel=1e-3)
    words = explain_racks(network, prices)
    assert f"crosses the 1:4 uplink of one rack {flows} times a round" in words
    assert "in rack-contiguous order 1: it is" in words
    assert re.search(r"Hierarchical .* 2\.33 times .* simulated, 2\.33 times in closed form", words)


def test_one_rank_sends_nothing() -> None:
    (first, *_) = ClusterNetwork(load_cluster("rack-1-4"), 1).price_all("all_reduce", GB)
    assert first.seconds == 0 and first.bound == ""


def test_levels_are_those_of_the_cluster() -> None:
    machines = ClusterNetwork(load_cluster("dgx-a100"), 32)
    collective = hierarchical(machines.cluster, 32)
    prove(collective)
    found = machines.price(collective, GB)
    ring = machines.price(build("all_reduce", "ring", 32), GB)
    assert found.seconds < ring.seconds / 4  # each device has a NIC, and a ring uses one
    shuffled = machines.price(build("all_reduce", "ring", 32), GB, AT_RANDOM)
    words = explain_racks(machines, [found, ring, shuffled])
    assert words.startswith("One ring leaves a node through one of its 8 NICs")


@pytest.mark.whole
@pytest.mark.parametrize("name", ["dgx-a100", "rack-1-4"])
def test_1024_workers_are_simulated_as_the_closed_form_says(name: str) -> None:
    network = ClusterNetwork(load_cluster(name), 1024)
    found = network.price(hierarchical(network.cluster, 1024), GB)
    assert found.simulated_s == pytest.approx(found.closed_form_s, rel=1e-3)


def test_rounds_of_one_message_are_priced_as_they_are_simulated() -> None:
    network = ClusterNetwork(load_cluster("rack-1-4"), 16)
    found = network.price(build("all_reduce", "naive", 16), GB)
    assert found.closed_form_s == pytest.approx(found.simulated_s, rel=1e-9)
    assert found.bound_bytes == 8 * 8 * GB  # each of 8 nodes to each of 8 of the other rack


def test_algorithms_with_a_path_for_every_pair_of_many_ranks_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.plan.simulator.contention.MOST_PAIRS", 200)
    network = ClusterNetwork(load_cluster("rack-1-4"), 16)
    names = {one.algorithm for one in network.price_all("all_reduce", GB)}
    assert {"ring", "hierarchical", "tree"} <= names
    assert not names & {"naive", "sequential", "direct"}


ALPHA_S = 1e-5
RATE = 1e10
ALGORITHMS = [(kind, name) for kind, family in CATALOG.items() for name in family]
UNEVEN = ("sequential", "naive", "double_tree", "hierarchical")  # a rank may be ahead of others


@pytest.mark.parametrize("num_bytes", few_or_all([100_000_000], [1000, 100_000_000]))
@pytest.mark.parametrize(
    "ranks", few_or_all([2, 5, 8], [*range(2, 9), 12, 16, 24, 31, 32, 33, 48, 63, 64])
)
def test_simulation_equals_the_closed_form_without_contention(ranks: int, num_bytes: int) -> None:
    wires = ports(ranks, RATE, ALPHA_S)
    for kind, name in ALGORITHMS:
        collective = build(kind, name, ranks)
        closed_s = price(collective, num_bytes, Link(ALPHA_S, 1 / RATE)).time_s
        simulated_s = simulate_collective(collective, num_bytes, wires)
        assert simulated_s == pytest.approx(closed_s, rel=1e-6), (kind, name)
        if len(collective.table.src) <= 20_000:
            own_pace_s = by_rank(collective, num_bytes, wires)
            assert own_pace_s <= closed_s * (1 + 1e-6)
            assert name in UNEVEN or own_pace_s == pytest.approx(closed_s, rel=1e-3)


def paths_of(*links: list[int]) -> Longs:
    width = max(1, *map(len, links))
    return np.array([[*path, *[-1] * (width - len(path))] for path in links], np.int64)


def test_of_a_long_way_many_messages_are_under_way_at_once() -> None:
    """Seven messages of 50 ms to one port: each holds it for 0.1 ms, and all travel together."""
    link = LinkSpec("wan", bytes_per_s=12.5e6, alpha_s=0.05)
    cluster = Cluster("wan", DEVICE, Node(1, nic=link), 8)
    src, num_bytes = np.arange(1, 8), 12_500.0
    network = MessageNetwork(Routes(cluster).capacities)
    network.start(Routes(cluster).ways(src, 0 * src), np.full(7, num_bytes), src)
    arrived = []
    while (at_s := network.next_end_s()) < math.inf:
        arrived += [(tag, at_s) for tag in network.advance(at_s)]
    assert sorted(tag for tag, _ in arrived) == src.tolist()
    assert [at_s for _, at_s in arrived] == pytest.approx([7 * 1e-4 + 0.0499 + 7 * 1e-3] * 7)


def test_a_flow_without_links_is_not_limited() -> None:
    assert max_min_rates(paths_of([], [0]), np.array([2.0])).tolist() == [math.inf, 2.0]


@st.composite
def networks(draw: st.DrawFn) -> tuple[Longs, list[float]]:
    capacities = draw(st.lists(st.floats(0.5, 20), min_size=1, max_size=6))
    links = st.sets(st.integers(0, len(capacities) - 1), min_size=1, max_size=4)
    flows = draw(st.lists(links, min_size=1, max_size=12))
    return paths_of(*map(sorted, flows)), capacities


@settings(deadline=None, max_examples=60)
@given(networks())
def test_every_flow_has_a_full_link_on_which_it_is_among_the_fastest(
    network: tuple[Longs, list[float]],
) -> None:
    """What defines max-min fairness: no flow can rise without lowering one that is not faster."""
    paths, capacities = network
    rates = max_min_rates(paths, np.array(capacities))
    on = {link: rates[(paths == link).any(axis=1)] for link in range(len(capacities))}
    for link, capacity in enumerate(capacities):
        assert on[link].sum() <= capacity * (1 + 1e-6)
    for path, rate in zip(paths.tolist(), rates, strict=True):
        assert any(
            on[link].sum() >= capacities[link] * (1 - 1e-6) and rate >= on[link].max() * (1 - 1e-6)
            for link in path
            if link >= 0
        )


@settings(deadline=None, max_examples=30)
@given(networks(), st.lists(st.floats(0.1, 5), min_size=12, max_size=12))
def test_flows_that_come_and_go_have_the_rates_of_those_that_are_there(
    network: tuple[Longs, list[float]], sizes: list[float]
) -> None:
    """New rates for what is connected with a change are the rates of a whole computation."""
    paths, capacities = network
    flows = FlowNetwork(np.array(capacities))
    there: dict[int, float] = {}
    for tag in range(len(paths)):
        flows.start(paths[[tag]], np.array([sizes[tag]]), np.array([tag]))
        there[tag] = sizes[tag]
        if tag % 2 and there:
            _check_next_end(flows, there, paths, np.array(capacities))
    while there:
        _check_next_end(flows, there, paths, np.array(capacities))
    assert len(flows) == 0 and flows.next_end_s() == math.inf


def _check_next_end(
    flows: FlowNetwork, there: dict[int, float], paths: Longs, capacities: np.ndarray
) -> None:
    rates = max_min_rates(paths[list(there)], capacities)
    took = min(left / rate for left, rate in zip(there.values(), rates, strict=True))
    began = flows.now_s
    assert flows.next_end_s() - began == pytest.approx(took, rel=1e-6, abs=1e-9)
    ended = flows.advance(flows.next_end_s()).tolist()
    for tag, rate in zip(list(there), rates, strict=True):
        there[tag] -= rate * took
    assert ended
    for tag in ended:
        assert there.pop(tag) == pytest.approx(0, abs=1e-6)


BYTES = 48e6
PORT_RATE = 100e6
PORT = ports(4, PORT_RATE)


@pytest.mark.parametrize("name", ["ring", "star", "tree", "hierarchical"])
def test_a_star_sends_back_a_segment_while_the_next_ones_come_and_a_ring_gains_nothing(
    name: str,
) -> None:
    collective = build("all_reduce", name, 4)
    whole_s = by_rank(collective, BYTES, PORT)
    assert simulate_in_segments(collective, BYTES, PORT, 1) == pytest.approx(whole_s)
    took_s = simulate_in_segments(collective, BYTES, PORT, 12)
    if name == "ring":
        assert took_s == pytest.approx(2 * 3 / 4 * BYTES / PORT_RATE)
    if name == "star":
        assert took_s == pytest.approx(3 * BYTES / PORT_RATE * (1 + 1 / 12))


def test_bad_order_and_levels_are_priced_on_the_links_of_racks() -> None:
    """Two racks of two hosts at 1:4: the uplink of a rack has half the rate of a host."""
    node = Node(1, nic=LinkSpec("nic", 100e6, 0.0))
    cluster = Cluster("racks", DEVICE, node, 4, 2, oversubscription=4.0)
    took_s = {
        name: host_schedule(name, 4, 2).predicted_s(cluster, int(BYTES))
        for name in (*PLAIN, *WITH_RACKS)
    }
    assert crossed(4, 2) == [0, 2, 1, 3]
    assert took_s["ring"] == took_s["gloo"] == pytest.approx(2 * 3 / 4 * BYTES / 50e6)
    assert took_s["crossed ring"] == pytest.approx(2 * took_s["ring"])
    assert BYTES / 50e6 < took_s["hierarchical"] < took_s["ring"] < took_s["star"]


WIRE_RATE = 1e9
WORK = StepWork((1.0,), (2.0,), gradient_bytes=(1e9,), parameter_bytes=(1e9,), update_s=0.1)


def run(agreeing: Agreeing, replicas: int = 4, work: StepWork = WORK, **more: Any) -> StepRun:
    grid = rank_grid(Layout(replicas, 1, work.stages))
    routes = ports(grid.size + len(agreeing.servers), WIRE_RATE)
    return simulate_step(work, agreeing, grid, routes, **more)


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
    assert shares.other == pytest.approx(0, abs=1e-9)


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
    found = run(Agreeing("gossip", graph="ring"), 6, StepWork((1.0,), (2.0,)), uneven=slow)
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
        expected = simulate(build_pipeline(name, stages, microbatches), times)
        found = run(Agreeing(), 1, StepWork(*passes, name, boundary_bytes=transfer * WIRE_RATE))
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


def test_zero_3_has_all_nics_of_a_node_in_both() -> None:
    """Two gathers a micro-batch and a reduction, bound by the network."""
    model = transformer_named("layers=24,hidden=2048,heads=16")
    question = (model, load_cluster("dgx-a100"), "zero(3)", 64, PlanSettings(64))
    assert predict(*question).step_s == pytest.approx(simulate_strategy(*question).step_s, rel=0.15)


def test_few_slow_hops_of_a_ring_delay_a_piece_once_a_turn() -> None:
    """Four sites, 25 ms apart, of 32 nodes each: the other 124 hops take microseconds."""
    cluster = replace(
        load_cluster("dgx-h100"),
        nodes=128,
        nodes_per_rack=32,
        oversubscription=100,
        uplink_alpha_s=0.025,
    )
    question = (MODEL, cluster, "localsgd(every=2)", 1024, PlanSettings(1024))
    simulated_s = simulate_strategy(*question).step_s
    assert simulated_s == pytest.approx(predict(*question).step_s, rel=0.1)


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
