"""The commands of docs/worked-examples.md print what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import scripts
from tests.commands.terminal import shoal

PAGE = (Path(__file__).parents[2] / "docs" / "worked-examples.md").read_text()


def prices(*words: str) -> dict[str, dict[str, float]]:
    """The algorithms of one kind by name."""
    (found,) = json.loads(shoal("collectives", *words, "--json").stdout)["collectives"]
    return {one["algorithm"]: one for one in found["algorithms"]}


@pytest.mark.parametrize("kind", ["reduce", "broadcast"])
def test_three_replicas_of_700_gb_send_1_4_tb_each_way(kind: str) -> None:
    words = ("--kind", kind, "--ranks", "3", "--bytes", "700GB", "--beta", "200Gb/s")
    found = prices(*words, "--alpha", "0")
    assert found["star"]["sent_total_bytes"] == 1.4e12


def test_gpt_3_has_1_4_tb_up_and_down_for_three_replicas() -> None:
    words = ("-n", "3", "-s", "ddp", "--network", "200Gb/s", "--precision", "fp32")
    shown = " ".join(shoal("predict", "gpt-3", *words).stdout.split())
    assert "175 billion parameters: 698 GB of gradients a replica" in shown
    assert "(4 bytes each), 27.9 s on the wire" in shown
    assert "1.4 TB go there and 1.4 TB come back, 55.9 s each way" in shown
    assert "forward" not in shown  # computing was not asked for


def test_1_tb_at_200_gb_per_s_takes_40_s() -> None:
    words = ("--kind", "broadcast", "--ranks", "2", "--bytes", "1TB", "--beta", "200Gb/s")
    shown = shoal("collectives", *words, "--alpha", "0").stdout
    assert "200 Gb/s = 25 GB/s" in shown
    assert re.search(r"^tree +1 40 s", shown, re.MULTILINE)


def test_two_servers_into_one_uplink_take_twice_as_long() -> None:
    cut = shoal("cluster", "show", "seeds-rack").stdout
    assert "oversubscribed 1:2): 10 Gb/s = 1.25 GB/s" in cut
    shown = shoal("collectives", "--cluster", "seeds-rack", "--bytes", "1GB", "--seed", "1").stdout
    rows = [line.split() for line in shown.splitlines() if line.startswith("ring ")]
    times = {row[1]: row[2:8] for row in rows}
    assert times["contiguous"] == ["1.2", "s", "1.2", "s", "1.2", "s"]
    assert times["random"] == ["1.2", "s", "2.4", "s", "2.4", "s"]


def test_the_servers_time_grows_with_n_and_the_rings_stays() -> None:
    words = ("--bytes", "1GB", "--beta", "10Gb/s", "--alpha", "0")
    found = {p: prices("--ranks", str(p), *words) for p in (4, 8, 16)}
    assert [found[p]["star"]["time_s"] for p in found] == pytest.approx([4.8, 11.2, 24.0])
    assert [found[p]["ring"]["time_s"] for p in found] == pytest.approx([1.2, 1.4, 1.5])
    assert found[4]["naive"]["time_s"] == pytest.approx(4 * 3 * 1e9 / 1.25e9)
    assert found[4]["naive"]["sent_total_bytes"] == 12e9


def test_a_reduce_scatter_leaves_p_minus_1_vectors_redundant() -> None:
    words = ("--kind", "reduce_scatter", "--ranks", "4", "--bytes", "100MB")
    said = " ".join(shoal("collectives", *words).stdout.split())
    assert "all ranks together hold 300 MB beyond" in said


@pytest.mark.whole
def test_an_operator_of_16_gb_needs_two_devices_of_10_gb(tmp_path: Path) -> None:
    (source,) = re.findall(r'```python title="big.py"\n(.*?)```', PAGE, re.DOTALL)
    (tmp_path / "big.py").write_text(source)
    alone = scripts.shoal("memory", "--limit", "10GB", "big.py", cwd=tmp_path)
    assert alone.returncode == 1
    assert "layer one alone needs 16 GB" in alone.stderr
    words = ("-n", "2", "--limit", "10GB", "-s", "ddp", "-s", "tp(2)", "-s", "pp(2)")
    both = scripts.shoal("memory", *words, "big.py", cwd=tmp_path)
    assert both.returncode == 0 and "within 10 GB a device: tp(2)" in both.stdout
    planned = scripts.shoal("plan", "-n", "2", "--limit", "10GB", "big.py", cwd=tmp_path)
    assert planned.returncode == 0
    (first,) = [line for line in planned.stdout.splitlines() if line.lstrip().startswith("1 ")]
    assert "tp(2)" in first
