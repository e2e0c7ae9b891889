"""Cluster files: presets are what datasheets say, and each mistake names file and key."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.cluster import Noise
from shoal.cluster.drawing import notes
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


def test_a_file_changes_keys_of_its_base() -> None:
    text = 'base = "dgx-a100"\nnodes = 2\n[device]\npeak_TFLOP_per_s = {{ fp16 = 1 }}\n{}'
    cluster, base = parse(text.format("[link.nvlink]\nGB_per_s = 1")), load_cluster("dgx-a100")
    assert (cluster.nodes, cluster.device.peak_flops) == (2, {"fp16": 1e12})
    assert cluster.device.matmul_efficiency == base.device.matmul_efficiency
    assert cluster.node.fabric is not None and base.node.fabric is not None
    assert cluster.node.fabric == replace(base.node.fabric, bytes_per_s=1e9)
    assert cluster.node.nic == base.node.nic
    for wrong, says in (
        ('base = "dgx-a10"', "did you mean 'dgx-a100'"),
        ("base = 3", "no preset 3"),
    ):
        with pytest.raises(BadInput, match=says):
            parse(wrong)


def test_failures_prices_and_storage_have_keys() -> None:
    keys = "mtbf_hours = 5000\nrepair_hours = 4\nprice_per_hour = 20.5\nwatts = 6500\nnic ="
    cluster = parse(f"{SMALL}[storage]\nGB_per_s = 100".replace("nic =", keys))
    node = cluster.node
    assert (node.mtbf_s, node.repair_s) == (5000 * 3600, 4 * 3600)
    assert (node.price_per_hour, node.watts) == (20.5, 6500)
    assert cluster.storage_bytes_per_s == 100e9
    assert parse(cluster_text(cluster)) == cluster


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
    text = page.read_text(encoding="utf-8").split("```toml ")[1].split("\n", 1)[1].split("```")[0]
    cluster = parse(text)
    assert (cluster.racks, cluster.oversubscription) == (2, 4)
    documented = set(page.read_text(encoding="utf-8").split("`"))
    assert set(preset_names()) <= documented


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"nvlink"', '"nvlnk"', "node.fabric: there is no [link.nvlnk]; did you mean 'nvlink'?"),
        ("oversubscription = 2", "oversubscription = 4", "spine.oversubscription: 1:4 is not"),
        ("launch_us", "lunch_us", "device: Object contains unknown field `lunch_us`"),
        ("memory_GB = 80", "", "device: Object missing required field `memory_GB`"),
        ("launch_us = 4", 'launch_us = "4"', "device.launch_us: Expected `float`, got `str`"),
        ("launch_us = 4", "launch_us = -4", "device.launch_us: Expected `float` >= 0"),
        ("GB_per_s = 300", "", "link.nvlink.GB_per_s: give either GB_per_s (bytes) or"),
        ("fp16 = 312", "pf16 = 312", "device.peak_TFLOP_per_s: Invalid enum value 'pf16'"),
        ('nic = "infiniband"', "", "nodes: 4 nodes need a network, and [node] names no nic"),
        ('fabric = "nvlink"', "", "node.fabric: 2 devices need a fabric or a pcie to meet"),
        ("devices = 2", "devices = 2\ntorus = [3, 3]", "node.torus: a torus of 3 x 3 does not"),
        ("devices = 2", "devices = 2\nsockets = 2", "node.socket_link: 2 sockets need a link"),
        ("uplinks = 1", "uplinks = 1\nports = 2", "rack.ports: 2 nodes take 2 ports and"),
        ("nodes = 4", "nodes = 5", "rack.nodes: 5 nodes do not fill racks of 2"),
        ("alpha_us = 5", "efficiency = 1.5", "link.nvlink.efficiency: Expected `float` <= 1"),
        ("[1900, 2000]", "[2000, 1900]", "device.spread.memory_GB_per_s: the lowest value comes"),
        ("[noise]", "[noise", "is not TOML"),
        ("[noise]", f"a = {'[' * 3000}{']' * 3000}", "is not TOML: maximum recursion"),
        ("[noise]", f"[{'.a' * 20000}]", "is not TOML: a line has more than 8192 characters"),
    ],
)
def test_a_mistake_names_the_file_and_the_key(old: str, new: str, problem: str) -> None:
    assert old in SMALL
    with pytest.raises(BadInput) as caught:
        parse(SMALL.replace(old, new, 1))
    assert problem in str(caught.value)
    assert str(caught.value).startswith("c.toml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    latin = tmp_path / "latin.toml"
    latin.write_bytes("name = 'Büro'".encode("latin-1"))
    (tmp_path / "huge.toml").write_text("a = 1\n" * 50_000)
    os.mkfifo(tmp_path / "fifo.toml")
    for name, problem in (
        (tmp_path / "none.toml", "No such file"),
        (tmp_path, "no regular file"),
        (tmp_path / "fifo.toml", "no regular file"),
        (tmp_path / "huge.toml", "has more than 256 KiB"),
        (latin, r"latin.toml: byte 9 is not UTF-8"),
        ("dgx-a10", "did you mean 'dgx-a100'"),
    ):
        with pytest.raises(BadInput, match=problem):
            load_cluster(name)


@pytest.mark.parametrize("preset", ["dgx-a100", "dgx-h100", "rack-1-4", "laptop"])
def test_presets_say_what_is_assumed(preset: str) -> None:
    cluster = load_cluster(preset)
    for part in (cluster.device, cluster.node.fabric or cluster.node.pcie):
        assert part is not None
        assert part.source == "assumed" or part.assumed
    assert "Assumed, not read or measured: " in " ".join(notes(cluster))
