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
    document = document_of("-s", "ddp(elastic=True)", "-s", "ddp")
    refused, ran = document["runs"]
    assert "does not lose any yet" in refused["refused"]
    assert ran["steps"] == 6


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--jitter", "2"), "share of a step's computing"),
        (("--slow", "7:2x"), "there is no worker 7"),
        (("--cluster", "no-such"), "no-such"),
        (("-s", "dpp"), "dpp"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[str, str], why: str) -> None:
    ended = shoal("rehearse", *SHORT, *words)
    assert ended.exit_code == 2 and why in ended.stderr
