"""`shoal memory`: estimated beside measured, and with `--limit` what fits on a device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shoal.commands.memory import COLUMNS, FURTHER, _notes, limit_of, need_of
from shoal.errors import BadInput
from shoal.strategy.strategy import as_strategy
from tests import scripts
from tests.products import few_or_all
from tests.scripts import json_of, shoal

WORKLOADS = Path(__file__).parents[2] / "docs" / "workloads.md"
HEADER = 256  # bytes of loss and flags, which some syncs copy


def memory(tmp_path: Path, script: str, *words: str) -> dict[str, Any]:
    (tmp_path / "train.py").write_text(script)
    done = shoal("memory", *words, "--json", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return json_of(done)


@pytest.mark.parametrize(
    "strategy",
    [
        "single",
        "zero(2)",
        *few_or_all([], ["ddp", 'localsgd(every=5, outer="nesterov", compress="int8")', "ps"]),
        "pp(2)",
        "tp(2)",  # the bias behind a row layer is whole
    ],
)
def test_the_estimate_is_what_is_measured(tmp_path: Path, strategy: str) -> None:
    workers = "1" if strategy == "single" else "2"
    found = memory(tmp_path, scripts.PLAIN, "-n", workers, "-s", strategy, "--measure")
    assert len(found["measured"]) == int(workers) and found["unknown"] == []
    for estimated, measured in zip(found["estimated"], found["measured"], strict=True):
        for column in (*COLUMNS, *FURTHER):
            assert estimated[column] == pytest.approx(measured[column], abs=HEADER), column


@pytest.mark.parametrize(
    ("strategy", "held", "is_explained"),
    [("zero(2)", 500, True), ("zero(2)", 900, False), ("ddp", 500, False), ("pp(2)", 500, False)],
)
def test_the_reason_of_uneven_shards_is_printed(
    strategy: str, held: int, is_explained: bool
) -> None:
    rows: list[dict[str, int | None]] = [
        {"parameters": 9, "gathered": 0, "gradients": 9, "optimizer": n} for n in (1000, held)
    ]
    assert bool(_notes(rows, as_strategy(strategy), 2)) is is_explained


LARGE = scripts.PLAIN.replace("nn.Linear(6, 16)", "nn.Linear(6, 10**10)").replace(
    "nn.Linear(16, 3)", "nn.Linear(10**10, 3)"
)


def test_a_model_of_400_gigabytes_is_estimated(tmp_path: Path) -> None:
    """Linear(6, 10^10) and Linear(10^10, 3): 10^11 parameters of 4 bytes, and momentum."""
    found = memory(tmp_path, LARGE, "-n", "4", "-s", "zero(3)")
    parameters = [row["parameters"] for row in found["estimated"]]
    assert sum(parameters) == pytest.approx(400e9, rel=1e-6)
    assert [row["optimizer"] for row in found["estimated"]] == pytest.approx(parameters, abs=64)
    assert max(parameters) == pytest.approx(240e9, rel=1e-6)  # one parameter is not divided


def test_a_model_that_tp_refuses_is_not_estimated(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(scripts.PLAIN)
    asked = 'tp(2, plan={"nowhere": "column"})'
    done = shoal("memory", "-n", "2", "-s", asked, "train.py", cwd=tmp_path)
    assert done.returncode == 2 and "nowhere" in done.stderr


def test_a_model_that_looks_at_values_has_no_known_activations(tmp_path: Path) -> None:
    looks = "class Looks(nn.Linear):\n    def forward(self, x):\n"
    looks += "        return super().forward(x) if x.sum().item() > 0 else super().forward(-x)\n"
    script = scripts.PLAIN.replace("def train(job)", looks + "\ndef train(job)")
    script = script.replace("job.step(model()", "job.step(Looks(6, 3)")
    found = memory(tmp_path, script)
    assert found["estimated"][0]["activations"] is None
    assert found["estimated"][0]["parameters"] >= 4 * 21
    assert found["unknown"]


def test_a_script_that_does_not_train_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')")
    done = shoal("memory", "train.py", cwd=tmp_path)
    assert done.returncode == 2 and "ended without a training step" in done.stderr


def write_script(folder: Path) -> None:
    """The one in docs/workloads.md: an operator of 16 GB and one of 1 GB."""
    (script,) = re.findall(r'```python title="big.py"\n(.*?)```', WORKLOADS.read_text(), re.DOTALL)
    (folder / "big.py").write_text(script)


@pytest.mark.whole
def test_two_devices_have_a_plan(tmp_path: Path) -> None:
    write_script(tmp_path)
    asked = ("-s", "ps", "-s", "pp(2)", "-s", "tp(2)", "-s", "ep(2)")
    done = shoal("memory", "-n", "2", "--limit", "10GB", *asked, "--json", "big.py", cwd=tmp_path)
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
    done = shoal("memory", "-n", "2", "--limit", "20GB", *asked, "big.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("each server", "stage 1", "too large", "fits", "by layer"):
        assert words in done.stdout
    assert "within 20 GB a device: pp(2)" in done.stdout


def test_a_strategy_fits_where_its_fullest_device_does() -> None:
    stages: list[dict[str, Any]] = [{"where": f"stage {i}", "total": 9 + i} for i in range(3)]
    assert [need_of("pp(3)", stages, limit)["fits"] for limit in (11, 10)] == [True, False]
    assert not need_of("ep(2)", [], None, "no experts")["fits"]
    stages[0]["activations"] = None
    assert [need_of("pp(3)", stages, limit)["fits"] for limit in (11, 10)] == [None, False]


def test_a_limit_is_a_size() -> None:
    assert limit_of("10GB") == 10_000_000_000
    for text, said in (("10 fish", "'10 fish' is not a size"), ("0", "--limit 0 leaves no memory")):
        with pytest.raises(BadInput, match=said):
            limit_of(text)
