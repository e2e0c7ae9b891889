"""Collectives in segments: what overlaps, and what does not."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.host_schedules import PLAIN, WITH_RACKS, crossed, host_schedule
from benchmarks.segments import simulate_in_segments
from shoal.cluster import Cluster, Node
from shoal.cluster.hardware import LinkSpec
from shoal.cluster.presets import load_cluster
from shoal.plan.contention.collectives import AT_RANDOM, ClusterNetwork, explain_racks, hierarchical
from shoal.plan.contention.messages import (
    FlowNetwork,
    Longs,
    MessageNetwork,
    Routes,
    max_min_rates,
    simulate_collective,
)
from shoal.schedules.collectives.catalog import CATALOG, build
from shoal.schedules.collectives.cost import Link, price
from shoal.schedules.collectives.proof import prove
from tests.plan.test_sync_price import DEVICE, by_rank, ports
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
    monkeypatch.setattr("shoal.plan.contention.collectives.MOST_PAIRS", 200)
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
