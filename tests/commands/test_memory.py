"""`shoal memory`: estimated beside measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.commands.memory import COLUMNS, FURTHER, _notes
from shoal.strategy.strategy import as_strategy
from tests import scripts
from tests.scripts import json_of, shoal

HEADER = 256  # bytes of loss and flags, which some syncs copy


def memory(tmp_path: Path, script: str, *words: str) -> dict[str, Any]:
    (tmp_path / "train.py").write_text(script)
    done = shoal("memory", "train.py", *words, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return json_of(done)


@pytest.mark.parametrize(
    "strategy",
    [
        "single",
        "ddp",
        "zero(2)",
        'localsgd(every=5, outer="nesterov", compress="int8")',
        "ps",
        "pp(2)",
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


def test_what_is_not_built_yet_is_estimated_and_not_measured(tmp_path: Path) -> None:
    found = memory(tmp_path, scripts.PLAIN, "-n", "4", "-s", "ddp + tp(2)")
    alone = memory(tmp_path, scripts.PLAIN, "-n", "2", "-s", "ddp")
    for half, whole in zip(found["estimated"], alone["estimated"] * 2, strict=True):
        assert half["parameters"] == pytest.approx(whole["parameters"] / 2, abs=1)


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
