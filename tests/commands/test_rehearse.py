"""`shoal rehearse`: strategies over virtual seconds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
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


def test_single_is_rehearsed_on_one_worker_for_the_others_to_be_compared_with() -> None:
    answer = shoal("rehearse", *SHORT, "-s", "ddp", "-s", "single")
    assert answer.exit_code == 0 and "equal (" in answer.stdout
    single, ddp = document_of("-s", "ddp", "-s", "single")["runs"]
    assert (single["strategy"], single["workers"], ddp["workers"]) == ("single", 1, 2)
    assert ddp["loss_difference"] < 1e-4


def test_without_single_there_is_nothing_to_compare_with() -> None:
    answer = shoal("rehearse", *SHORT, "-s", "ddp")
    assert answer.exit_code == 0 and "against single" not in answer.stdout


def test_compare_virtual_is_a_rehearsal() -> None:
    answer = shoal("compare", *SHORT, "-s", "ddp", "--virtual", "--json")
    assert json.loads(answer.stdout) == document_of("-s", "ddp")
    refused = shoal("compare", "digits", "--virtual", "--apart")
    assert refused.exit_code == 2 and "--virtual" in refused.stderr


def test_ctrl_c_ends_a_rehearsal() -> None:
    command = [sys.executable, "-m", "shoal", "rehearse", "digits", "-n", "2", "-s", "ddp"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "rehearsing" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130 and "interrupted" in rest


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--jitter", "2"), "share of a step's computing"),
        (("--slow", "7:2x"), "there is no worker 7"),
        (("--kill", "7@2"), "there is no worker 7"),
        (("--mtbf", "soon"), "is not a time"),
        (("--cluster", "no-such"), "no-such"),
        (("--cluster", "no/such.toml"), "no/such.toml"),
        (("-n", "0"), "Invalid value for '--workers'"),
        (("-s", "dpp"), "dpp"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[str, str], why: str) -> None:
    ended = shoal("rehearse", *SHORT, *words)
    assert ended.exit_code == 2 and why in ended.stderr
