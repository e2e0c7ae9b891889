"""`shoal compare`: several strategies side by side, in processes that are started once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.commands.compare import _strategies, groups_of
from shoal.errors import BadInput
from shoal.observe.comparison import ComparedRun, RunOutcome, steps_per_s
from tests.scripts import json_of, script, shoal

SCRIPT = script("""
def accuracy(outputs, targets):
    return {"accuracy": (outputs.argmax(1) == targets).double().mean()}

def train(job):
    step = job.step(model(), loss, optimizer=sgd)
    for batch in job.batches(data, batch_size=20, epochs=50):
        job.log(loss=step(batch))
    job.evaluate(accuracy, data)
""")
SCRIPT += '    raise ValueError("what follows is not part of the comparison")\n'


def test_runs_of_one_start(tmp_path: Path) -> None:
    """The same model, data and seed: ddp is equal to single, to rounding."""
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["compare", "train.py", "-n", "2", "--steps", "18", "--json"]
    document: dict[str, Any] = json_of(
        shoal(*words, "-s", "hogwild", "-s", "ddp", "-s", "mapreduce", cwd=tmp_path)
    )
    runs = {run["strategy"]: run for run in document["runs"]}
    assert list(runs) == ["single", "hogwild", "ddp", "mapreduce"]
    assert runs["ddp"]["loss_difference"] < 1e-5
    assert runs["ddp"]["loss"] == pytest.approx(runs["single"]["loss"], abs=1e-4)
    assert runs["ddp"]["evaluated"] == pytest.approx(runs["single"]["evaluated"])
    # 18 batches of 20 from 103 samples, of which 6 make an epoch, which is a step of mapreduce
    assert [run["steps"] for run in document["runs"]] == [18, 18, 18, 3]
    assert runs["hogwild"]["bytes_sent"] == 0
    assert runs["single"]["bytes_sent"] is None
    assert runs["ddp"]["bytes_sent"] > 18 * 4 * (6 * 16 + 16 + 16 * 3 + 3)  # half of it, twice
    for run in document["runs"]:
        assert run["samples_per_s"] > 0
        assert run["computing"] + run["waiting"] + run["idle"] == pytest.approx(1)
    assert runs["hogwild"]["against_single"].startswith("loss ")
    assert " after 3 steps" in runs["mapreduce"]["against_single"]


GLOBAL_MODEL = SCRIPT.replace("def train", "own = model()\ndef train").replace(
    "job.step(model()", "job.step(own"
)


def test_a_model_of_an_earlier_run_is_refused_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GLOBAL_MODEL)
    done = shoal("compare", "train.py", "-n", "1", "--steps", "3", "-s", "ddp", cwd=tmp_path)
    assert done.returncode == 1
    assert "the script makes its model outside" in done.stdout.replace("\n", " ")


def test_a_script_that_fails_by_itself_is_reported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('no luck')")
    done = shoal("compare", "train.py", "-n", "1", "-s", "ddp", cwd=tmp_path)
    assert done.returncode == 1
    assert "no luck" in done.stderr


def entry(number: int, strategy: str) -> ComparedRun:
    return ComparedRun(number, strategy, 2, "nowhere")


def test_what_needs_servers_gets_processes_of_its_own() -> None:
    entries = [entry(i, name) for i, name in enumerate(["single", "ddp", "ps", "hogwild"])]
    assert groups_of(entries, apart=False) == [[entries[0], entries[1], entries[3]], [entries[2]]]
    assert groups_of(entries, apart=True) == [[each] for each in entries]


def test_strategies_are_each_compared_once_and_nonsense_is_refused() -> None:
    assert _strategies(["ddp", "single", "ddp()"], 2) == ["ddp"]
    with pytest.raises(BadInput, match="makes no sense"):
        _strategies(["hogwild + pp(2)"], 2)
    assert {"ddp", "hogwild", "mapreduce"} <= set(_strategies(None, 2))


def test_workers_in_turns_that_train_one_after_the_other_are_no_faster_than_one() -> None:
    """Each takes 5 batches in 1 s, which count as 10 steps of the job."""
    reports = [
        {"steps_per_s": 10.0, "seconds": 1.0, "measured_ns": [s * 10**9, (s + 1) * 10**9]}
        for s in (0, 1)
    ]
    assert steps_per_s(reports, in_turns=True) == pytest.approx(5.0)
    assert steps_per_s([reports[0], reports[0]], in_turns=True) == pytest.approx(10.0)
    assert steps_per_s(reports, in_turns=False) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss_difference": 2e-7}, "equal (2e-07)"),
        ({"loss_difference": 0.03}, "differs by 3.0%"),
        ({"loss": 0.512, "loss_gap": 0.0123}, "loss 0.512, single 0.500"),
        (
            {"loss": 3.0, "first_loss": 2.0, "training_loss": 3.0, "loss_gap": 2.5},
            "loss 3.000, at the start 2.000, single 0.500",
        ),
        (
            {"loss": 0.7, "steps": 1, "loss_gap": 0.2, "single_steps": 10},
            "loss 0.700 after 1 step, single 0.500 after 10",
        ),
        ({"first_loss": 2.0, "training_loss": None}, "the loss is not a finite number"),
    ],
)
def test_what_is_said_of_the_difference_to_single(fields: dict[str, Any], words: str) -> None:
    assert RunOutcome("any", 2, **fields).against_single == words
