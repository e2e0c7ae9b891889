"""Figures that were measured on a machine take the place of closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.cluster.cluster import Cluster, Node
from shoal.cluster.hardware import Device, LinkSpec, MeasuredCalls
from shoal.errors import BadInput
from shoal.plan.step.collective_time import RankGroup, collective_time
from shoal.plan.step.layer_time import KernelModel
from shoal.plan.workloads.workload import Kernel

CORE = Device("core", 1e9, 1e10, {"fp32": 1e10}, launch_s=5e-6, synchronous=True)
CALLS = MeasuredCalls("shm", "all_reduce", "", 2, ((1e3, 1e-5), (1e6, 1e-3)))


def test_calls_are_linear_between_points_and_go_on_at_the_last_rate() -> None:
    assert CALLS.seconds(10) == 1e-5
    assert CALLS.seconds(1e6) == pytest.approx(1e-3)
    assert CALLS.seconds(500_500) == pytest.approx((1e-5 + 1e-3) / 2)
    assert CALLS.seconds(2e6) == pytest.approx(1e-3 + (1e-3 - 1e-5) / (1e6 - 1e3) * 1e6)


def test_calls_without_increasing_sizes_are_refused() -> None:
    with pytest.raises(BadInput, match="increasing sizes"):
        replace(CALLS, points=((2.0, 1.0), (1.0, 1.0)))


def test_measured_calls_inside_a_node_scale_with_the_ranks() -> None:
    node = Node(4, fabric=LinkSpec("shm", 1e9, 1e-6), measured=(CALLS,))
    cluster = Cluster("host", CORE, node)
    two = collective_time(cluster, "all_reduce", RankGroup(2, 1), 1e6)
    four = collective_time(cluster, "all_reduce", RankGroup(4, 1), 1e6)
    assert two.seconds == pytest.approx(1e-3)
    assert four.seconds == pytest.approx(1e-3 * 0.75 / 0.5)


def test_the_nearest_number_of_workers_decides_the_device() -> None:
    slow = replace(CORE, name="crowded")
    cluster = Cluster("host", CORE, Node(16, crowded=((1, CORE), (16, slow))))
    assert cluster.device_of(2) is CORE
    assert cluster.device_of(12) is slow
    assert Cluster("host", CORE, Node(16)).device_of(12) is CORE


def test_on_a_cpu_launches_add_to_kernels() -> None:
    kernel = Kernel("product", 1e6, 0.0, 100, 100, 50)
    assert KernelModel(CORE, "fp32").time([kernel]).seconds == pytest.approx(1e-4 + 5e-6)
    gpu = replace(CORE, synchronous=False)
    assert KernelModel(gpu, "fp32").time([kernel]).seconds == pytest.approx(1e-4)
    slower = replace(CORE, backward_launch_s=2e-5)
    backward = KernelModel(slower, "fp32").time([kernel], backward=True)
    assert backward.launch_s == pytest.approx(2e-5)
