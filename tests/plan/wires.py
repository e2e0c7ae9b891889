"""Small networks for the simulator's tests: a port a rank, racks, and uplinks between them."""

from __future__ import annotations

from shoal.cluster.cluster import Cluster, Node
from shoal.cluster.hardware import Device, LinkSpec
from shoal.cluster.topology import ClusterTopology
from shoal.plan.simulator.messages import Routes
from shoal.plan.simulator.synchronization import in_rounds
from shoal.plan.simulator.task_graph import TaskGraph
from shoal.schedules.collectives.collective import Collective

DEVICE = Device("device", 1e9, 1e9, {"fp32": 1e9})


def ports(
    ranks: int,
    bytes_per_s: float,
    alpha_s: float = 0.0,
    per_rack: int | None = None,
    oversubscription: float = 1.0,
) -> Routes:
    """Each rank is a node with one port; a rack's uplinks together may be narrower than those."""
    node = Node(1, nic=LinkSpec("port", bytes_per_s, alpha_s))
    cluster = Cluster("ports", DEVICE, node, ranks, per_rack, oversubscription)
    return Routes(ClusterTopology(cluster))


def by_rank(collective: Collective, num_bytes: float, routes: Routes) -> float:
    """Seconds where a rank begins its next round as soon as it is through with this one."""
    graph = TaskGraph()
    end = in_rounds(graph, collective, range(collective.ranks), num_bytes, graph.join(()))
    return graph.run(routes, collective.ranks).end_s[end]
