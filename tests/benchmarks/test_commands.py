"""Each benchmark runs once at a small size: what it prints, not how fast it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import hosts
from benchmarks.__main__ import app
from shoal.commands.cli import run_app
from shoal.errors import BadInput
from tests import forked

ROOT = Path(__file__).parents[2]
FEW = ["--rounds", "2"]


def benchmark(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads of many tests wait for each other
    return forked.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def document_of(*words: str) -> Any:
    done = benchmark(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.whole
def test_a_step_beside_ddp() -> None:
    words = ["step", "-n", "2", "--workload", "digits", "--device", "cpu", *FEW]
    (found,) = document_of(*words)["results"]
    assert (found["workers"], found["peer"]) == (2, "DistributedDataParallel")
    assert found["ratio"]["median"] > 0


@pytest.mark.whole
def test_tables_are_printed() -> None:
    words = ["--ranks", "2", "--sizes", "4,1KB", "--against", "gloo"]
    done = benchmark("collectives", *words, *FEW)
    assert done.returncode == 0, done.stderr
    for word in ("µs a call", "how many times as long", "all_reduce", "gloo /"):
        assert word in done.stdout


@pytest.mark.whole
def test_a_pipeline_beside_that_of_torch() -> None:
    found = document_of("pipeline", "--batch-size", "4", "--microbatches", "2", "--no-idle", *FEW)
    assert [each["schedule"] for each in found["results"]] == ["gpipe", "1f1b"]


@pytest.mark.whole
def test_a_parameter_server_alone() -> None:
    found = document_of("ps", "--against", "", "--size", "100KB", *FEW)
    assert (found["workers"], found["bytes"], found["rows"]) == (2, 100_000, 1000)
    (alone,) = found["results"]
    assert alone["peer"] is None and set(alone["dense"]) == {"shoal"}
    rows_a_second = alone["rows_per_s"]["shoal"]
    assert rows_a_second == pytest.approx(1e6 / alone["sparse"]["shoal"]["median_ms"])


@pytest.mark.whole
def test_copies_of_a_server_survive_a_kill(tmp_path: Path) -> None:
    words = ["--replicas", "1,2", "--consistency", "strong", "--svg", str(tmp_path / "a.svg")]
    _, found = document_of("ps", *words, *FEW)["results"]
    assert found["undone"] == 0 and found["without_service_s"] > 0
    rects = ElementTree.parse(tmp_path / "a.svg").iter("{http://www.w3.org/2000/svg}rect")
    assert sum(rect.get("x") is not None for rect in rects) == 3, "a bar for each figure"


@pytest.mark.whole
def test_rows_are_asked_in_three_ways() -> None:
    words = ["--rows", "2000", "--batch", "500", "--share", "0.01", "--pulls", "2"]
    assert set(document_of("rows", *words, *FEW)["ways"]) == {"owners", "copies", "cache"}


@pytest.mark.whole
def test_predictions_are_compared_with_runs() -> None:
    words = ["--models", "mlp-small", "-s", "ddp", "--rounds", "1", "--cluster", "this-machine"]
    (model,) = document_of("predict", *words, "--device", "cpu")["models"]
    assert model["measured_best"] == "ddp"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ps --against horovod", "shoal: --against takes ray, rpc, sockets, not horovod\n"),
        ("ps --consistency weak", "add --replicas 1,2,3"),
        ("ps --svg replicas.svg", "add --replicas 1,2,3"),
        ("ps --replicas 99", "--replicas takes"),
        ("ps --replicas 1,x", "--replicas takes"),
        ("ps --replicas 2 --consistency weak", "--consistency takes"),
        ("step --workload x", "shoal: --workload takes digits, gpt, mlp, mlp-small"),
        ("rows --share 0", "--share"),
        ("rows --exponent -1", "--exponent"),
        ("rows --on ray", "--on takes lab"),
    ],
)
def test_bad_input_is_a_sentence(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_app(app, "benchmarks", words.split())
    assert stopped.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["1", "5", "x", "\u00b2", ",", "9" * 5000])
def test_numbers_of_hosts_are_those_of_the_lab(ranks: str) -> None:
    with pytest.raises(BadInput, match="a number of hosts from 2 to 4 is expected"):
        hosts._counts(ranks, 4)


@pytest.mark.whole
def test_the_start_of_workers_beside_torchrun() -> None:
    found = document_of("start", "-n", "2", *FEW)["results"]
    ways = [(each["way"], each["workers"]) for each in found]
    assert ways == [
        ("import torch", 1),
        ("python", 1),
        *((w, 2) for w in ("torchrun", "fork", "spawn")),
    ]
    assert all(len(each["cpu_s"]) == 2 and min(each["cpu_s"]) > 0 for each in found)
    assert found[-1]["first_step_s"][0] < found[-1]["whole_s"][0]
