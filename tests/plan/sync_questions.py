"""Questions to the prices of ways to agree, for tests."""

from __future__ import annotations

from typing import Any

from shoal.cluster.cluster import Cluster, Node, Noise
from shoal.cluster.hardware import Device, LinkSpec
from shoal.plan.step.collective_time import Network, RankGroup
from shoal.plan.sync_price.base import SyncQuestion
from shoal.plan.workloads.workload import Precision

FP32 = Precision("fp32", 4, 4, 0, 8)
GPU = Device("gpu", 80e9, 2e12, {"fp32": 1e14})
NIC = LinkSpec("NIC", 25e9, 5e-6)  # 200 Gb/s
NVLINK = LinkSpec("NVLink", 250e9, 2e-6)


def cluster_of(nodes: int = 1, devices: int = 8, **options: Any) -> Cluster:
    node = Node(devices, fabric=NVLINK, nic=NIC)
    return Cluster("test", GPU, node, nodes, **options)


def ask(cluster: Cluster, replicas: int, parameters: float = 1e9, **options: Any) -> SyncQuestion:
    settings: dict[str, Any] = {
        "precision": FP32,
        "compute_s": 0.3,
        "backward_s": 0.2,
        "microbatches": 1,
        "workers": replicas,
        **options,
    }
    return SyncQuestion(Network(cluster), RankGroup(replicas, 1), parameters, **settings)


QUIET = Noise()
