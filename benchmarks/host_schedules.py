"""What `python -m benchmarks hosts` measures, as schedules: run by `bench.hosts`, and predicted.

ring           in the order of the hosts
star           everything through rank 0
tree           to rank 0 along a binomial tree, and back
crossed ring   in an order in which every neighbour is in another rack
hierarchical   reduce-scatter inside a rack, all-reduce between racks, all-gather inside
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.segments import simulate_in_segments
from shoal.cluster import Cluster
from shoal.plan.contention.messages import Routes
from shoal.schedules.collectives import Collective, segments_for
from shoal.schedules.collectives.catalog import build
from shoal.schedules.collectives.hierarchical import hierarchical_all_reduce

GLOO = "gloo"
PLAIN = ("ring", GLOO, "star", "tree")
WITH_RACKS = ("crossed ring", "hierarchical")


@dataclass(frozen=True)
class HostSchedule:
    """`order[r]` is the host of rank r of the collective."""

    collective: Collective
    order: tuple[int, ...]

    def predicted_s(self, cluster: Cluster, num_bytes: int) -> float:
        """On one worker of each of the first hosts of a cluster, with contention, in segments."""
        routes = Routes(cluster, [h * cluster.node.devices for h in self.order])
        segments = segments_for(int(self.collective.chunk_bytes(num_bytes)))
        return simulate_in_segments(self.collective, num_bytes, routes, segments)


def host_schedule(name: str, hosts: int, rack: int) -> HostSchedule:
    """`rack` hosts are in a rack. Gloo sums up large tensors in a ring."""
    order = tuple(crossed(hosts, rack) if name == "crossed ring" else range(hosts))
    if name == "hierarchical":
        return HostSchedule(hierarchical_all_reduce(hosts, rack), order)
    algorithm = name if name in ("star", "tree") else "ring"
    return HostSchedule(build("all_reduce", algorithm, hosts), order)


def crossed(hosts: int, rack: int) -> list[int]:
    """Hosts in an order in which neighbours are in different racks: 0 2 1 3 for racks of two."""
    return [host for index in range(rack) for host in range(index, hosts, rack)]
