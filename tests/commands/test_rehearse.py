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
from tests import forked
from tests.commands.terminal import shoal_apart as shoal

SHORT = ("-n", "2", "--cluster", "dgx-a100", "--steps", "6")


def document_of(*words: str) -> Any:
    """Its progress is on stderr."""
    answer = shoal("rehearse", *SHORT, *words, "--json", "digits")
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


def test_a_recorded_rehearsal_has_the_page_of_a_run(tmp_path: Path) -> None:
    asked = ("-s", 'ps(mode="async")', "--slow", "1:3x", "--record", str(tmp_path / "kept"))
    shown = shoal("rehearse", *SHORT, *asked, "digits")
    assert shown.exit_code == 0, shown.stderr
    assert "updates between a pull and its push, and how often: 0:" in shown.stdout
    report = json.loads((tmp_path / "kept" / "report.json").read_text())
    assert report["rehearsed"] == "dgx-a100" and report["steps"] == 6
    assert [len(rank["losses"]) for rank in report["ranks"]] == [6, 6]
    page = shoal("report", str(tmp_path / "kept"), "-o", str(tmp_path / "page.html"))
    assert page.exit_code == 0, page.stderr
    assert "on dgx-a100, in virtual time" in (tmp_path / "page.html").read_text()


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
    answer = shoal("rehearse", *SHORT, "-s", "ddp", "-s", "single", "digits")
    assert answer.exit_code == 0 and "equal (" in answer.stdout
    single, ddp = document_of("-s", "ddp", "-s", "single")["runs"]
    assert (single["strategy"], single["workers"], ddp["workers"]) == ("single", 1, 2)
    assert ddp["loss_difference"] < 1e-4


def test_without_single_there_is_nothing_to_compare_with() -> None:
    answer = shoal("rehearse", *SHORT, "-s", "ddp", "digits")
    assert answer.exit_code == 0 and "against single" not in answer.stdout


def test_compare_virtual_is_a_rehearsal() -> None:
    answer = shoal("compare", *SHORT, "-s", "ddp", "--virtual", "--json", "digits")
    assert json.loads(answer.stdout) == document_of("-s", "ddp")
    refused = shoal("compare", "--virtual", "--apart", "digits")
    assert refused.exit_code == 2 and "--virtual" in refused.stderr


def test_ctrl_c_ends_a_rehearsal() -> None:
    command = [sys.executable, "-m", "shoal", "rehearse", "-n", "2", "-s", "ddp", "digits"]
    with forked.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "rehearsing" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130 and "interrupted" in rest


DIVERGES = """
import os
from functools import partial
import torch, shoal

def train(job):
    os.write(1, b"written")
    print("printed")
    x = torch.randn(64, 4)
    sgd = partial(torch.optim.SGD, lr=1e30)
    step = job.step(torch.nn.Linear(4, 4), torch.nn.functional.mse_loss, optimizer=sgd)
    for batch in job.batches([(x, x)] * 6):
        step(batch)

if __name__ == "__main__":
    os.write(1, b"written")
    shoal.run(train)
"""


def test_a_loss_that_is_nan_is_told_and_json_stays_one_document(tmp_path: Path) -> None:
    (tmp_path / "diverges.py").write_text(DIVERGES)
    asked = ("rehearse", "-n", "40", "--cluster", "dgx-a100", "-s", "ddp")
    script = str(tmp_path / "diverges.py")
    command = [sys.executable, "-m", "shoal", *asked, "--json", script]
    answer = forked.run(command, capture_output=True, text=True, check=True)
    (run,) = json.loads(answer.stdout)["runs"]
    assert run["losses"][-1] is None and run["losses"][0] > 0
    kept = tmp_path / "kept"
    shown = " ".join(shoal(*asked, "--record", str(kept), script).stdout.split())
    page = shoal("report", str(kept), "-o", str(tmp_path / "page.html"))
    assert page.exit_code == 0, page.stderr
    assert "is not a finite number" in shown and "ddp nan" in shown and "printed" not in shown


def test_rows_of_embeddings_are_rehearsed() -> None:
    asked = ("-n", "2", "--cluster", "laptop", "--steps", "4", "-s", "ps(servers=2)")
    answer = shoal("rehearse", *asked, "--json", "clicks")
    assert answer.exit_code == 0, answer.stderr
    assert json.loads(answer.stdout)["runs"][0]["steps"] == 4


def test_events_of_a_file_that_is_none_are_refused(tmp_path: Path) -> None:
    for content, why in (
        (b"[[events]]\nat = '1s'\nwho = '1'\n", "it takes tables [[event]]"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b"[[event]]\n" + b"k" * 8000 + b" = 1\n", "unknown field `kk"),
    ):
        (tmp_path / "events.toml").write_bytes(content)
        answer = shoal("rehearse", *SHORT, "--events", str(tmp_path / "events.toml"), "digits")
        assert answer.exit_code == 2 and why in " ".join(answer.stderr.split())
        assert len(answer.stderr) < 500


def test_a_cluster_grows_with_the_workers_and_this_is_told() -> None:
    answer = shoal("rehearse", *SHORT, "-n", "10", "-s", "ddp", "digits")
    assert answer.exit_code == 0
    assert "the cluster has 1 node; rehearsed as if it had 2" in answer.stdout


def test_without_training_there_are_speeds_and_no_losses() -> None:
    answer = shoal("rehearse", *SHORT, "-s", "ddp", "--no-train", "digits")
    assert answer.exit_code == 0
    assert "steps/s" in answer.stdout and "there are no losses" in answer.stdout
    found = json.loads(
        shoal("rehearse", *SHORT, "-s", "ddp", "--no-train", "--json", "digits").stdout
    )
    assert found["runs"][0]["loss"] is None and found["runs"][0]["losses"] == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--jitter", "2"), "share of a step's computing"),
        (("--slow", "7:2x"), "there is no worker 7"),
        (("--no-train", "--until", "loss=1"), "with --no-train there are none"),
        (("--kill", "7@2"), "there is no worker 7"),
        (("--kill", "host:1@2"), "host:0@5min, not 'host:1@2'"),
        (("--kill", "host:7@2s"), "there is no host 7 to be lost: the run has 1 host"),
        (("--mtbf", "soon"), "is not a time"),
        (("-n", "100000"), "shoal predict"),
        (("--cluster", "no-such"), "no-such"),
        (("--cluster", "no/such.toml"), "no/such.toml"),
        (("-n", "0"), "Invalid value for '--workers'"),
        (("-s", "dpp"), "dpp"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[str, str], why: str) -> None:
    ended = shoal("rehearse", *SHORT, *words, "digits")
    assert ended.exit_code == 2 and why in ended.stderr
