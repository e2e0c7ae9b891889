from __future__ import annotations

import re

import pytest

from shoal.cluster.presets import load_cluster
from shoal.errors import BadInput
from shoal.plan.simulator.contention import AT_RANDOM, ClusterNetwork, explain_racks, hierarchical
from shoal.schedules.collectives.catalog import build
from shoal.schedules.collectives.proof import prove

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
    assert "in rack-contiguous order once, so it needs no help" in words
    assert re.search(r"Hierarchical .* 2\.33 times .* simulated, 2\.33 times in closed form", words)


def test_a_cluster_grows_with_its_ranks_and_one_rank_sends_nothing() -> None:
    cluster = load_cluster("rack-1-4")
    assert ClusterNetwork(cluster, 40).cluster.devices == 40
    (first, *_) = ClusterNetwork(cluster, 1).price_all("all_reduce", GB)
    assert first.seconds == 0 and first.bound == ""
    with pytest.raises(BadInput, match="at least one rank, not 0"):
        ClusterNetwork(cluster, 0)


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
