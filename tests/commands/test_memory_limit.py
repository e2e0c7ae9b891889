"""`shoal memory --limit`: an operator of 16 GB and one of 1 GB on devices of 10 GB."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.commands.memory import limit_of, need_of
from shoal.errors import BadInput
from tests.scripts import json_of, shoal

DOCUMENT = Path(__file__).parents[2] / "docs" / "workloads.md"


def write_script(folder: Path) -> None:
    """The one in docs/workloads.md."""
    blocks = DOCUMENT.read_text().split("```python\n")[1:]
    [script] = [block.split("```")[0] for block in blocks if "shoal.run(train)" in block]
    (folder / "big.py").write_text(script)


@pytest.mark.whole
def test_two_devices_have_a_plan(tmp_path: Path) -> None:
    write_script(tmp_path)
    asked = ("-s", "ps", "-s", "pp(2)", "-s", "tp(2)", "-s", "ep(2)")
    done = shoal("memory", "big.py", "-n", "2", "--limit", "10GB", *asked, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ps, pp, tp, ep = json_of(done)["strategies"]
    assert [device["where"] for device in ps["devices"]] == ["each worker", "the server"]
    assert ps["devices"][1]["total"] == pytest.approx(8.5e9)  # all weights
    assert [round(device["total"] / 1e9) for device in pp["devices"]] == [16, 1]
    assert tp["most"] == pytest.approx(8.5e9, rel=0.01)
    assert [found["fits"] for found in (ps, pp, tp, ep)] == [False, False, True, False]
    assert "ep(2)" in ep["refused"]


@pytest.mark.whole
def test_tables_name_stages_servers_and_layers(tmp_path: Path) -> None:
    write_script(tmp_path)
    asked = ("-s", "ps(servers=2)", "-s", "pp(2)")
    done = shoal("memory", "big.py", "-n", "2", "--limit", "20GB", *asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("each server", "stage 1", "too large", "fits", "by layer"):
        assert words in done.stdout
    assert "within 20 GB a device: pp(2)" in done.stdout


def test_a_strategy_fits_where_its_fullest_device_does() -> None:
    stages = [{"where": f"stage {i}", "total": 9 + i} for i in range(3)]
    assert [need_of("pp(3)", stages, limit)["fits"] for limit in (11, 10)] == [True, False]
    assert not need_of("ep(2)", [], None, "no experts")["fits"]


def test_a_limit_is_a_size() -> None:
    assert limit_of("10GB") == 10_000_000_000
    for text, said in (("10 fish", "'10 fish' is not a size"), ("0", "--limit 0 leaves no memory")):
        with pytest.raises(BadInput, match=said):
            limit_of(text)
