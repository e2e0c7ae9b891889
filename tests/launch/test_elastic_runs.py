"""Runs of processes whose workers are killed, come back and join."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.chaos.elastic_kills import sweep, undisturbed
from tests.disturbed import ROOT, DisturbedRun

SHARDED = [f"zero({stage}, elastic=True)" for stage in (1, 2, 3)]
AVERAGES = ["localsgd(every=4)", 'gossip(graph="complete")', "gossip"]


def with_joining(run: DisturbedRun, at: int) -> None:
    """Run it with a worker that is asked for after this step, when the others wait for it."""
    with run.going_on(own := {**os.environ, "TMPDIR": str(run.folder)}):
        run.until(lambda: any(noted.step >= at for noted in run.log.read()), "come to the step")
        command = [sys.executable, "-m", "shoal", "join"]
        asked = {"cwd": ROOT, "env": own, "check": True, "capture_output": True, "text": True}
        said = forked.run(command, **asked, timeout=100).stdout
        assert re.fullmatch(
            r"worker 2 has joined the run [a-z0-9-]+\n", said
        )  # as `shoal ps` names it


def used(run: DisturbedRun, worker: int) -> set[int]:
    """The steps that a worker has done."""
    return {noted.step for noted in run.log.read() if noted.worker == worker}


@pytest.mark.parametrize(
    "strategy",
    ["ddp(elastic=True)", *(pytest.param(text, marks=pytest.mark.whole) for text in SHARDED)],
)
def test_a_killed_worker_and_its_return_change_no_bit(tmp_path: Path, strategy: str) -> None:
    options = ("-n", "3", "-s", strategy, "--kill", "0@9", "--restart", "1")
    run = DisturbedRun(tmp_path / "run", options, steps=40, waits_at=12)
    with run.going_on():
        pass
    assert run.bits() == undisturbed("tally", 40)
    assert "worker 0 was lost at step 9 and came back after" in run.stderr
    said = run.stdout + run.stderr
    assert "[1] step 10/40  loss" in said, "progress comes from the first worker that is there"
    assert "[0] step 40/40  loss" in said
    document = json.loads((run.folder / "report.json").read_text())
    (back,) = document["came_back"]
    assert (back["lost_at"], document["steps"]) == (8, 40)
    assert set(range(back["step"] + 1, 41)) <= used(run, 0)


def test_a_run_of_too_few_workers_ends_with_one_sentence(tmp_path: Path) -> None:
    run = DisturbedRun(tmp_path / "run", ("--elastic", "2:2", "--kill", "1@5"), steps=40)
    with pytest.raises(AssertionError), run.going_on():
        pass
    assert run.stderr.strip().endswith("1 worker is left, fewer than the 2 of --elastic")


@pytest.mark.whole
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["ddp", "zero(3)", *AVERAGES])
def test_a_worker_that_joins_at_step_40_of_100_is_used(tmp_path: Path, strategy: str) -> None:
    options = ("-n", "2", "--elastic", "1:3", "-s", strategy)
    recipe = "counts" if strategy in AVERAGES else "tally"
    run = DisturbedRun(tmp_path / "run", options, steps=100, recipe=recipe, waits_at=40)
    with_joining(run, 40)
    assert run.trains_each_sample_once()
    assert strategy in AVERAGES or run.bits() == undisturbed("tally", 100)
    joined = re.search(r"worker 2 joined at step (\d+)", run.stderr)
    assert joined is not None and used(run, 2) == set(range(int(joined[1]), 101))


@pytest.mark.whole
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("strategy", ["ddp", "zero(1)", "zero(2)", "zero(3)"])
def test_twenty_kills_at_random_moments_change_no_bit(strategy: str) -> None:
    said = sweep(strategy)
    print(said)
    assert not said.startswith("WRONG"), said
