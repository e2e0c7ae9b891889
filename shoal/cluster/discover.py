"""What this machine is made of, read and not measured: cores, NUMA nodes, memory, GPUs, NICs."""

from __future__ import annotations

import os

from shoal.cluster.cluster import Cluster, Node
from shoal.cluster.hardware import Curve, Device, LinkSpec


def this_machine() -> Cluster:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = Device(
        f"one core of {cores}", memory / cores, 10e9, {"fp32": 48e9}, Curve(((1e6, 0.5),))
    )
    node = Node(cores, LinkSpec("shared memory", 10e9, 5e-6, shared=True), cores=cores)
    return Cluster("this-machine", device, node)
