"""Cluster files: presets are what datasheets say, and each mistake names file and key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.cluster.cluster import Cluster, Node, Noise
from shoal.cluster.drawing import notes
from shoal.cluster.hardware import Curve, Device, LinkSpec, MeasuredCalls
from shoal.cluster.presets import load_cluster, preset_names
from shoal.cluster.toml_file import cluster_text, parse_cluster
from shoal.errors import BadInput

SMALL = """
nodes = 4
[device]
memory_GB = 80
memory_GB_per_s = 2039
launch_us = 4
peak_TFLOP_per_s = { fp32 = 19.5, fp16 = 312 }
spread = { memory_GB_per_s = [1900, 2000], "peak_TFLOP_per_s.fp16" = [250, 290] }
[link.nvlink]
GB_per_s = 300
alpha_us = 5
[link.infiniband]
Gb_per_s = 200
[node]
devices = 2
fabric = "nvlink"
nic = "infiniband"
[rack]
nodes = 2
uplinks = 1
uplink = "infiniband"
[spine]
oversubscription = 2
[noise]
jitter = 0.02
straggler_share = 0.1
straggler_slowdown = 4
"""


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


def parse(text: str):  # type: ignore[no-untyped-def]
    return parse_cluster(text, "c.toml", "c")


def test_keys_carry_units() -> None:
    cluster = parse(SMALL)
    assert cluster.device.memory_bytes == 80e9
    assert cluster.device.launch_s == pytest.approx(4e-6)
    assert cluster.device.flops_of("fp16") == 312e12
    assert cluster.node.fabric is not None and cluster.node.fabric.alpha_s == pytest.approx(5e-6)
    assert cluster.node.nic is not None and cluster.node.nic.bytes_per_s == 25e9
    assert cluster.noise == Noise(0.02, 0.1, 4)
    spread = cluster.device.spread
    assert spread["memory_bytes_per_s"] == (1900e9, 2000e9)
    assert spread["peak_flops.fp16"] == (250e12, 290e12)


def test_the_pcie_of_a_server_is_slower_than_nvlink_and_memory() -> None:
    node = load_cluster("dgx-a100").node
    assert node.fabric is not None and node.pcie is not None
    assert 2 * node.fabric.bytes_per_s == 600e9  # both directions
    assert 2 * node.pcie.bytes_per_s == 64e9
    assert load_cluster("ethernet-10").device.memory_bytes_per_s == 1935e9


@pytest.mark.parametrize("name", sorted(set(preset_names())))
def test_a_preset_is_the_same_after_it_is_written(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.devices >= 1
    text = cluster_text(cluster)
    assert cluster_text(parse_cluster(text, name, name)) == text


def test_the_file_in_the_documentation_is_read() -> None:
    page = Path(__file__).parents[2] / "docs/cluster.md"
    text = page.read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0]
    cluster = parse(text)
    assert (cluster.racks, cluster.oversubscription) == (2, 4)
    documented = set(page.read_text(encoding="utf-8").split("`"))
    assert set(preset_names()) <= documented


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"nvlink"', '"nvlnk"', "node.fabric: there is no [link.nvlnk]; did you mean nvlink?"),
        ("oversubscription = 2", "oversubscription = 4", "spine.oversubscription: 1:4 is not"),
        (
            "memory_GB = 80",
            "memory_Gb = 80",
            "device: Object contains unknown field `memory_Gb`",
        ),
        (
            "launch_us",
            "lunch_us",
            "device: Object contains unknown field `lunch_us`",
        ),
        ("memory_GB = 80", "", "device: Object missing required field `memory_GB`"),
        ("launch_us = 4", 'launch_us = "4"', "device.launch_us: Expected `float`, got `str`"),
        ("launch_us = 4", "launch_us = -4", "device.launch_us: Expected `float` >= 0"),
        ("launch_us = 4", "launch_us = nan", "device.launch_us: Expected `float` >= 0"),
        ("launch_us = 4", f"launch_us = 1{'0' * 400}", "device.launch_us: Number out of range"),
        ("launch_us = 4", "launch_us = true", "device.launch_us: Expected `float`"),
        ("GB_per_s = 300", "GB_per_s = 0", "link.nvlink.GB_per_s: Expected `float` > 0"),
        ("GB_per_s = 300", "", "link.nvlink.GB_per_s: give either GB_per_s (bytes) or"),
        ("fp16 = 312", "pf16 = 312", "device.peak_TFLOP_per_s: Invalid enum value 'pf16'"),
        ("nodes = 4", "nodes = 0", "nodes: Expected `int` >= 1"),
        ("nodes = 4", "nodes = 2.5", "nodes: Expected `int`"),
        ("nodes = 4", "noeds = 4", "Object contains unknown field `noeds`"),
        ('nic = "infiniband"', "", "nodes: 4 nodes need a network, and [node] names no nic"),
        ('fabric = "nvlink"', "", "node.fabric: 2 devices need a fabric or a pcie to meet"),
        ("devices = 2", "devices = 2\ntorus = [3, 3]", "node.torus: a torus of 3 x 3 does not"),
        ("devices = 2", "devices = 2\nsockets = 2", "node.socket_link: 2 sockets need a link"),
        ("uplinks = 1", "uplinks = 1\nports = 2", "rack.ports: 2 nodes take 2 ports and"),
        ("nodes = 4", "nodes = 5", "rack.nodes: 5 nodes do not fill racks of 2"),
        ("alpha_us = 5", "efficiency = 1.5", "link.nvlink.efficiency: Expected `float` <= 1"),
        ("alpha_us = 5", 'source = "guess"', "link.nvlink.source: Invalid enum value"),
        ("[1900, 2000]", "[2000, 1900]", "device.spread.memory_GB_per_s: the lowest value comes"),
        (
            "launch_us = 4",
            "matmul_efficiency = [[1, 2]]",
            "device.matmul_efficiency[0][1]: Expected",
        ),
        ("[noise]", "[noise", "is not TOML"),
        ("[noise]\n", "[[noise]]\n", "noise: Expected `object`, got `array`"),
    ],
)
def test_a_mistake_names_the_file_and_the_key(old: str, new: str, problem: str) -> None:
    assert old in SMALL
    with pytest.raises(BadInput) as caught:
        parse(SMALL.replace(old, new, 1))
    assert problem in str(caught.value)
    assert str(caught.value).startswith("c.toml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        load_cluster(tmp_path / "none.toml")
    with pytest.raises(BadInput, match="Is a directory"):
        load_cluster(tmp_path)
    latin = tmp_path / "latin.toml"
    latin.write_bytes("name = 'Büro'".encode("latin-1"))
    with pytest.raises(BadInput, match=r"latin.toml: byte 9 is not UTF-8"):
        load_cluster(latin)
    with pytest.raises(BadInput, match="did you mean dgx-a100"):
        load_cluster("dgx-a10")


@pytest.mark.parametrize("preset", ["dgx-a100", "dgx-h100", "rack-1-4", "laptop"])
def test_presets_say_what_is_assumed(preset: str) -> None:
    cluster = load_cluster(preset)
    for part in (cluster.device, cluster.node.fabric or cluster.node.pcie):
        assert part is not None
        assert part.source == "assumed" or part.assumed
    assert "Assumed, not read or measured: " in " ".join(notes(cluster))


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


def test_a_mistake_in_measured_calls_names_file_and_call() -> None:
    text = cluster_text(MACHINE).replace("points = [[256", "points = [[9e9")
    with pytest.raises(BadInput, match=r"m\.toml: the calls of all_reduce need .*increasing"):
        parse_cluster(text, "m.toml", "other")
