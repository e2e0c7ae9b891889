"""Groups of ranks on nodes and racks, against a look at every rank of the topology."""

from __future__ import annotations

import itertools

import pytest

from shoal.cluster.cluster import Cluster, Node
from shoal.plan.step.collective_time import RankGroup, collective_time, group_places, hops
from tests.plan.sync_questions import GPU, NIC, NVLINK, cluster_of

SIZES = (2, 3, 4, 6, 8, 12)
STRIDES = (1, 2, 3, 4, 5, 6, 8, 12, 16)


def groups_of(group: RankGroup, total: int) -> list[list[int]]:
    size, stride = group
    return [
        [block + first + i * stride for i in range(size)]
        for block in range(0, total - size * stride + 1, size * stride)
        for first in range(stride)
    ]


@pytest.mark.parametrize("devices", [4, 6, 8])
def test_places_are_those_of_a_look_at_every_rank(devices: int) -> None:
    for size, stride in itertools.product(SIZES, STRIDES):
        group = RankGroup(size, stride)
        total = 2 * devices * size * stride
        cluster = Cluster("looked at", GPU, Node(devices), total // devices)
        leaving: dict[int, int] = {}
        pairs: dict[int, int] = {}
        most = 0
        counts = set()
        for ranks in groups_of(group, total):
            nodes = [cluster.place(rank)[1] for rank in ranks]
            counts |= {nodes.count(node) for node in nodes}
            most = max(most, max(map(nodes.count, nodes)) if len(set(nodes)) > 1 else 0)
            for here, there in zip(nodes, nodes[1:] + nodes[:1], strict=True):
                leaving[here] = leaving.get(here, 0) + (here != there)
                pairs[here] = pairs.get(here, 0) + size - nodes.count(here)
        found = group_places(group, devices, total)
        assert found.leaving == max(leaving.values()), (group, devices)
        assert found.leaving_pairs == max(pairs.values()), (group, devices)
        assert found.inside == (most or size), (group, devices)
        assert found.is_even == (len(counts) == 1), (group, devices)


def test_a_group_that_crosses_a_node_is_as_slow_as_the_network() -> None:
    """Three of eight ranks: groups (6, 7, 8) and (15, 16, 17) both leave the second node."""
    three = hops(cluster_of(3), RankGroup(3, 1))
    assert [hop.level for hop in three] == ["NVLink", "NIC"]
    assert three[-1].bytes_per_s == NIC.rate / 2
    (two,) = hops(cluster_of(3), RankGroup(2, 1))
    assert two.bytes_per_s == NVLINK.rate


def test_all_ranks_of_a_rack_share_its_uplinks_in_an_all_to_all() -> None:
    racks = cluster_of(8, nodes_per_rack=4, oversubscription=4)
    took = collective_time(racks, "all_to_all", RankGroup(64, 1), 64e6)
    uplinks = 4 * NIC.rate / 4
    assert took.bound.startswith("spine uplink 1:4")
    assert took.seconds == pytest.approx(63 * NIC.alpha_s + 32 * 32 * 1e6 / uplinks)
