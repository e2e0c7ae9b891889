"""Questions to the prices of ways to agree, for tests."""

from __future__ import annotations

from typing import Any

from shoal.cluster import Cluster, Node
from shoal.cluster.hardware import Device, LinkSpec
from shoal.cluster.topology import ClusterTopology
from shoal.plan.simulator.messages import Routes
from shoal.plan.simulator.task_graph import TaskGraph, in_rounds
from shoal.plan.step.collective_time import Network, RankGroup
from shoal.plan.sync_price import SyncQuestion
from shoal.plan.workloads import Precision
from shoal.schedules.collectives import Collective

FP32 = Precision("fp32", 4, 4, 0, 8)
GPU = Device("gpu", 80e9, 2e12, {"fp32": 1e14})
NIC = LinkSpec("NIC", 25e9, 5e-6)  # 200 Gb/s
NVLINK = LinkSpec("NVLink", 250e9, 2e-6)


def cluster_of(nodes: int = 1, devices: int = 8, **options: Any) -> Cluster:
    node = Node(devices, fabric=NVLINK, nic=NIC)
    return Cluster("test", GPU, node, nodes, **options)


def ask(cluster: Cluster, replicas: int, parameters: float = 1e9, **options: Any) -> SyncQuestion:
    times = {"compute_s": 0.3, "backward_s": 0.2, "microbatches": 1, "workers": replicas}
    group = RankGroup(replicas, 1)
    return SyncQuestion(Network(cluster), group, parameters, FP32, **(times | options))


DEVICE = Device("device", 1e9, 1e9, {"fp32": 1e9})


def ports(ranks: int, bytes_per_s: float, alpha_s: float = 0.0) -> Routes:
    """Each rank is a node with one port."""
    node = Node(1, nic=LinkSpec("port", bytes_per_s, alpha_s))
    return Routes(ClusterTopology(Cluster("ports", DEVICE, node, ranks)))


def by_rank(collective: Collective, num_bytes: float, routes: Routes) -> float:
    """Seconds where a rank begins its next round as soon as it is through with this one."""
    graph = TaskGraph()
    end = in_rounds(graph, collective, range(collective.ranks), num_bytes, graph.join(()))
    return graph.run(routes, collective.ranks).end_s[end]
