"""Runs on several hosts whose workers leave and come back while the others go on."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.here.local import LaunchSpec
from shoal.launch.here.output import Write
from shoal.launch.here.running import ask_to_join
from shoal.launch.hosts.remote import LostHosts, run_attempts
from shoal.launch.losses.lost_workers import RunResult, tolerance_of
from shoal.runtime.config import RunConfig
from shoal.strategy.strategy import parse
from tests.launch.helpers import Screen
from tests.launch.hosts_here import HostsHere

# Each process writes a file; those of the first start wait for that of one that comes later.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
rank, incarnation = os.environ["RANK"], os.environ.get("SHOAL_INCARNATION", "0")
print("here", rank, incarnation, os.environ["LOCAL_RANK"], os.environ["SHOAL_HOST"])
how, late = sys.argv[1:]
if how != "join" and rank == "1" and incarnation == "0":
    os.kill(os.getpid() if how == "worker" else os.getppid(), signal.SIGKILL)
    time.sleep(60)
Path(f"here-{rank}-{incarnation}").touch()
while not Path(f"here-{late}-1").exists():
    time.sleep(0.02)
"""


def run(
    tmp_path: Path,
    how: str,
    shown: Write,
    machines: HostsHere,
    late: int = 1,
    workers: int = 2,
    **options: Any,
) -> RunResult:
    """`late` is the worker that comes later."""
    (tmp_path / "script.py").write_text(SCRIPT)
    config = replace(RunConfig.from_environment(), strategy="ddp(elastic=True)", **options)
    losses = (config.restarts, config.start, config.min_workers)
    tolerance = tolerance_of(parse("ddp(elastic=True)"), workers, *losses)
    spec = LaunchSpec([sys.executable, "script.py", how, str(late)], workers, config)
    with machines:
        return run_attempts(machines, replace(spec, tolerance=tolerance), shown)


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("how", "comes_to"), [("worker", "[1 h1] here 1 1 0 127.0.0.2"), ("agent", "[1 h0] here 1 1 1")]
)
def test_a_lost_worker_comes_back_on_its_host_or_for_a_lost_host_on_another_one(
    tmp_path: Path, how: str, comes_to: str
) -> None:
    shown = Screen()
    machines = HostsHere([1, 1])
    result = run(tmp_path, how, shown, machines, restarts=1)
    assert comes_to in shown.out
    assert shown.out.count("here 0") == 1, "the other worker was started again"
    assert "worker 1 was killed by SIGKILL" in shown.err
    assert "it is started again (1 of 1)" in shown.err
    assert ("h1 is lost" in shown.err) <= (how == "agent")
    assert [worker.rank for worker in result.returned] == [1]
    assert len(machines.started) == 3


def test_a_worker_that_is_asked_for_starts_where_the_first_ones_have_left_a_slot(
    tmp_path: Path,
) -> None:
    shown = Screen()

    def write(text: str, is_stderr: bool) -> None:
        shown(text, is_stderr)
        if "here 0 0" in text:
            ask_to_join(None)

    run(tmp_path, "join", write, HostsHere([2, 2]), late=2, workers=4, start=2)
    assert "worker 2 of 4 is started, as it was asked for" in shown.err
    assert "[1 h1] here 1 0 0 127.0.0.2" in shown.out
    assert "[2 h0] here 2 1 1 127.0.0.1" in shown.out


def test_where_a_worker_gave_up_the_launcher_waits_until_it_notices_that_its_host_is_cut_off() -> (
    None
):
    lost = LostHosts()
    lost.note_exit(2, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lost.has_host_of, 2, "h2")
        lost.add("h2")
        assert waiting.result(timeout=30)
    assert lost.names == {"h2"}


def test_a_killed_worker_comes_back_on_its_host_at_once_and_the_end_of_the_run_ends_this_wait() -> (
    None
):
    lost = LostHosts()
    for rank, returncodes in ((2, (1, -9)), (3, (1,))):
        for returncode in returncodes:
            lost.note_exit(rank, returncode)
    assert not lost.has_host_of(2, "h2")
    lost.end()
    assert not lost.has_host_of(3, "h3")
