"""What is written to a cluster file is read back as the same cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.cluster.cluster import Cluster, Node
from shoal.cluster.hardware import Curve, Device, LinkSpec, MeasuredCalls
from shoal.cluster.presets import load_cluster, preset_names
from shoal.cluster.toml_file import parse_cluster
from shoal.cluster.toml_writer import cluster_text
from shoal.errors import BadInput

CORE = Device(
    'one "core"',
    4e9,
    11e9,
    {"fp32": 48e9},
    Curve(((1e4, 0.1), (1e8, 0.9))),
    launch_s=3e-6,
    backward_launch_s=7e-6,
    synchronous=True,
    update_bytes_per_s=5e9,
    update_launch_s=30e-6,
    step_s=200e-6,
    served_step_s=900e-6,
    request_s=400e-6,
    wait_s=80e-6,
    meet_s=60e-6,
    threads=1,
    source="measured",
    spread={"memory_bytes_per_s": (10e9, 12e9), "peak_flops.fp32": (47e9, 49e9)},
)
CALLS = MeasuredCalls(
    "shm", "all_reduce", "", 2, ((256.0, 5e-6), (1048576.0, 2e-4)), ((4e-6, 6e-6), (1e-4, 3e-4))
)
MACHINE = Cluster(
    "host",
    CORE,
    Node(
        2,
        LinkSpec("shared memory", 10e9, 5e-6, shared=True),
        cores=2,
        crowded=((1, replace(CORE, threads=2)), (2, CORE)),
        measured=(CALLS,),
    ),
    source="measured",
)


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_the_same_after_writing(name: str) -> None:
    cluster = load_cluster(name)
    again = parse_cluster(cluster_text(cluster), "file", "other")
    assert cluster_text(again) == cluster_text(cluster)
    assert again.node.devices == cluster.node.devices
    assert again.oversubscription == pytest.approx(cluster.oversubscription)


def test_what_was_measured_is_kept() -> None:
    again = parse_cluster(cluster_text(MACHINE), "file", "other")
    assert [workers for workers, _ in again.node.crowded] == [1, 2]
    core = again.device_of(2)
    assert core.backward_launch_s == pytest.approx(7e-6)
    assert core.synchronous
    assert core.spread["peak_flops.fp32"] == pytest.approx((47e9, 49e9))
    assert again.device_of(1).threads == 2
    calls = again.node.calls("all_reduce", 2)
    assert calls is not None
    assert calls.seconds(1048576) == pytest.approx(2e-4)
    assert calls.spread[0] == pytest.approx((4e-6, 6e-6))


def test_a_mistake_in_measured_calls_names_file_and_key() -> None:
    text = cluster_text(MACHINE).replace("points = [[256", "points = [[9e9")
    with pytest.raises(BadInput, match=r"m\.toml: \[measured\] points: .*increasing"):
        parse_cluster(text, "m.toml", "other")
