from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shoal.cluster.presets import load_cluster
from tests.commands.terminal import Answer, shoal


def show(*arguments: str) -> Answer:
    return shoal("cluster", "show", *arguments)


def test_every_level_is_shown_in_bits_and_bytes() -> None:
    asked = ("dgx-a100", "--nodes", "8", "--racks", "2", "--oversubscription", "4")
    shown = show(*asked).stdout
    assert "64 devices, 8 nodes in 2 racks" in shown
    assert "uplinks of a rack: 1.6 Tb/s = 200 GB/s, oversubscribed 1:4" in shown
    assert "8 x InfiniBand HDR: 200 Gb/s = 25 GB/s each" in shown
    assert "NVLink 3: 2.4 Tb/s = 300 GB/s a device" in shown
    assert "PCIe 4.0 x16: 256 Gb/s = 32 GB/s" in shown
    assert "both directions together: NVLink 3 600 GB/s, PCIe 4.0 x16 64 GB/s." in shown
    assert "The narrowest cut is between racks" in shown


@pytest.mark.parametrize("name", ["dgx-a100", "laptop", "rack-1-4", "tpu-torus"])
def test_a_preset_is_shown_as_text_picture_and_json(name: str, tmp_path: Path) -> None:
    assert show(name).exit_code == 0
    picture = tmp_path / "c.svg"
    answer = show(name, "--svg", str(picture), "--json")
    document = json.loads(answer.stdout)
    assert document["devices"] == load_cluster(name).devices
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_discover_writes_a_file_that_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    answer = shoal("cluster", "discover", "-o", str(path), "--json")
    found = json.loads(answer.stdout)
    assert found["host"]["cores"] >= 1
    assert load_cluster(path).devices == found["cluster"]["devices"]
    assert "cores" in shoal("cluster", "discover").stdout
