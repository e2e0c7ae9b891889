"""Paths through a cluster, what shares a link, and the narrowest cut."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations

import networkx
import pytest

from shoal.cluster import Cluster
from shoal.cluster.drawing import levels, narrowest, narrowest_cut
from shoal.cluster.presets import load_cluster
from shoal.cluster.topology import ClusterTopology, neighbors

RING = [(rank, (rank + 1) % 8) for rank in range(8)]


def crowd(topology: ClusterTopology, pairs: list[tuple[int, int]]) -> float:
    """Seconds until messages of one byte are there, all at once: the busiest link decides."""
    users = Counter(link for src, dst in pairs for link in topology.path(src, dst))
    return max(count / topology.links[link].bytes_per_s for link, count in users.items())


def two_racks(oversubscription: float = 4) -> Cluster:
    cluster = load_cluster("dgx-a100")
    return replace(cluster, nodes=4, nodes_per_rack=2, oversubscription=oversubscription)


def names(topology: ClusterTopology, src: int, dst: int) -> list[str]:
    return [topology.links[link].name for link in topology.path(src, dst)]


def test_two_servers_over_one_uplink_take_twice_as_long() -> None:
    topology = ClusterTopology(load_cluster("seeds-rack"))
    alone = crowd(topology, [(0, 2)])
    assert crowd(topology, [(0, 2), (1, 3)]) == 2 * alone
    assert crowd(topology, [(0, 1), (2, 3)]) == alone
    assert 1.25e9 * alone == 1


def test_a_path_goes_through_nic_uplink_and_spine() -> None:
    topology = ClusterTopology(two_racks())
    assert names(topology, 0, 0) == []
    assert names(topology, 0, 5) == ["NVLink 3 of gpu 0", "NVLink 3 of gpu 5"]
    assert names(topology, 1, 8) == [
        "PCIe 4.0 x16 of gpu 1",
        "InfiniBand HDR of node 0",
        "InfiniBand HDR of node 1",
        "PCIe 4.0 x16 of gpu 8",
    ]
    assert names(topology, 0, 31)[2:4] == ["uplink of rack 0", "uplink of rack 1"]
    # alphas add up to that of the outermost link
    alphas = [topology.alpha_s(0, dst) for dst in (1, 8, 16)]
    assert alphas == pytest.approx([4.1e-6, 18e-6, 19e-6])


def test_devices_without_a_fabric_share_pcie_and_the_link_between_sockets() -> None:
    cluster = load_cluster("dgx-a100")
    pcie = ClusterTopology(replace(cluster, node=replace(cluster.node, fabric=None)))
    assert len(pcie.path(0, 1)) == 2
    assert len(pcie.path(0, 2)) == 4
    assert "Infinity Fabric of node 0" in names(pcie, 0, 7)
    assert crowd(ClusterTopology(cluster), RING) < crowd(pcie, RING) / 5
    all_pairs = list(permutations(range(8), 2))
    assert crowd(ClusterTopology(cluster), all_pairs) < crowd(pcie, all_pairs) / 5


def test_a_shared_pcie_is_one_link_for_all_devices() -> None:
    cluster = load_cluster("dgx-a100")
    shared = replace(cluster.node.pcie, shared=True)  # type: ignore[type-var]
    node = replace(cluster.node, fabric=None, pcie=shared, devices_per_pcie=8)
    topology = ClusterTopology(replace(cluster, node=node))
    assert crowd(topology, RING) == pytest.approx(8 * crowd(topology, RING[:1]))


def test_ip_over_infiniband_goes_through_the_host() -> None:
    cluster = replace(load_cluster("dgx-a100"), nodes=2)
    ip = replace(cluster.node.nic, transport="ipoib")  # type: ignore[type-var]
    through = ClusterTopology(replace(cluster, node=replace(cluster.node, nic=ip)))
    assert names(through, 0, 8)[1] == "PCIe 4.0 x16 above pcie 0 of node 0"
    both = [(0, 8), (1, 9)]  # behind one PCIe switch
    assert crowd(through, both) > crowd(ClusterTopology(cluster), both)


def test_devices_share_one_nic_or_have_one_each() -> None:
    cluster = replace(load_cluster("dgx-a100"), nodes=2)
    one = ClusterTopology(replace(cluster, node=replace(cluster.node, nics=1)))
    sends = [(rank, rank + 8) for rank in range(8)]
    assert crowd(one, sends) == pytest.approx(8 / 22.75e9)
    assert crowd(ClusterTopology(cluster), sends) == pytest.approx(1 / 22.75e9)


def test_torus_paths_take_the_shorter_way_round() -> None:
    topology = ClusterTopology(load_cluster("tpu-torus"))
    assert sorted(neighbors((8, 8), 0)) == [1, 7, 8, 56]
    assert len(topology.path(0, 7)) == 1
    assert len(topology.path(0, 36)) == 8  # four steps along each axis
    assert topology.alpha_s(0, 2) == pytest.approx(2e-6)
    assert crowd(topology, RING) == 1 / 45e9


def test_the_bisection_is_the_largest_flow_between_two_halves() -> None:
    racks = [two_racks(ratio) for ratio in (1, 4, 16)]
    inside = [replace(load_cluster(name), nodes=1) for name in ("dgx-a100", "tpu-torus")]
    for cluster in (*racks, *inside):
        flow = _flow(cluster, cluster.devices // 2)
        assert levels(cluster)[-1].bisection_bytes_per_s == pytest.approx(flow)


def _flow(cluster: Cluster, half: int) -> float:
    """The largest flow from the first ranks to the others over the links of all their paths."""
    topology = ClusterTopology(cluster)
    graph = networkx.DiGraph()
    for src in range(half):
        graph.add_edge("in", ("gpu", src))
        for dst in range(half, cluster.devices):
            graph.add_edge(("gpu", dst), "out")
            at: object = ("gpu", src)
            for link in topology.path(src, dst):
                rate = topology.links[link].bytes_per_s
                graph.add_edge(at, (link, 0))
                graph.add_edge((link, 0), (link, 1), capacity=rate)
                at = (link, 1)
            graph.add_edge(at, ("gpu", dst))
    return float(networkx.maximum_flow_value(graph, "in", "out"))


def test_the_narrowest_cut_is_named_with_its_rate() -> None:
    words = narrowest_cut(load_cluster("seeds-rack"))
    assert "between racks (uplinks to the spine, oversubscribed 1:2)" in words
    assert "10 Gb/s = 1.25 GB/s each way" in words
    even, inside = two_racks(1), load_cluster("dgx-a100")
    for cluster, name in ((even, "rack"), (replace(inside, nodes=1), "node")):
        level = narrowest(cluster)
        assert level is not None and level.name == name
    assert narrowest_cut(load_cluster("h200")) == "One device: nothing has to cross a link."
