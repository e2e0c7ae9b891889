"""`shoal rehearse`: strategies over virtual seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.runtime.trace import open_trace
from tests.commands.terminal import shoal

SHORT = ("digits", "-n", "2", "--cluster", "dgx-a100", "--steps", "6")


def document_of(*words: str) -> Any:
    """Its progress is on stderr."""
    answer = shoal("rehearse", *SHORT, *words, "--json")
    assert answer.exit_code == 0, answer.stderr
    return json.loads(answer.stdout)


def test_losses_and_seconds_of_each_strategy(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    asked = ("-s", "ddp", "-s", 'ps(mode="async")', "--slow", "1:3x", "--trace", str(trace))
    document = document_of(*asked)
    ddp, served = document["runs"]
    assert [ddp["strategy"], served["strategy"]] == ["ddp", 'ps(mode="async")']
    assert len(ddp["losses"]) == len(ddp["loss_s"]) == 6
    assert ddp["loss_s"] == sorted(ddp["loss_s"])
    assert served["staleness"] > 0 and served["dropped"] == 0
    assert ddp["idle"] is not None and ddp["cpu_s_per_step"] is None
    assert {"server 0", 0, 1} == set(open_trace(trace))


def test_a_strategy_that_is_refused_does_not_hide_the_others() -> None:
    document = document_of("-s", "ddp", "-s", "ddp(elastic=True)", "--restart", "1")
    refused, ran = document["runs"]
    assert refused["refused"].startswith("--restart: ddp cannot take a worker back")
    assert ran["steps"] == 6


def test_losses_are_told_and_may_end_a_strategy(tmp_path: Path) -> None:
    (tmp_path / "events.toml").write_text('[[event]]\nat = "1h"\nwho = "1"\n')
    events = ("--events", str(tmp_path / "events.toml"))
    asked = ("-s", "ps", "-s", 'ps(mode="async")', "--kill", "1@3", "--mtbf", "8h", *events)
    ended, went_on = document_of(*asked)["runs"]
    assert ended["failed"] == "worker 1 was killed by SIGKILL"
    assert went_on["lost"] == [1] and went_on["steps"] == 6
    assert went_on["said"][-1] == "finished by worker 0, without worker 1"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--jitter", "2"), "share of a step's computing"),
        (("--slow", "7:2x"), "there is no worker 7"),
        (("--kill", "7@2"), "there is no worker 7"),
        (("--mtbf", "soon"), "is not a time"),
        (("--cluster", "no-such"), "no-such"),
        (("-s", "dpp"), "dpp"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[str, str], why: str) -> None:
    ended = shoal("rehearse", *SHORT, *words)
    assert ended.exit_code == 2 and why in ended.stderr
