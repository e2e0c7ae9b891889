"""Elastic runs on the hosts of a lab, which are lost, and whose workers come back on others."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from shoal.launch.lab.design import LabDesign
from shoal.launch.lab.lab import Lab, build_lab, remove_lab
from tests import forked
from tests.chaos.elastic_kills import sweep, undisturbed
from tests.disturbed import DisturbedRun
from tests.namespaces import why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.whole,
    pytest.mark.timeout(600),
]
STEPS = 2000
NAME = f"elastic{os.getpid() % 100_000}"


@pytest.fixture
def lab() -> Iterator[Lab]:
    yield build_lab(LabDesign(NAME, 4, 2, 125e6))
    remove_lab(NAME)


@pytest.fixture
def own_runs() -> Iterator[dict[str, str]]:
    """An environment in which `shoal join` finds no other runs."""
    with tempfile.TemporaryDirectory() as folder:
        yield {**os.environ, "TMPDIR": folder}


def kill_host(lab: Lab, host: int = 0) -> None:
    for pid in lab.hosts[host].namespace.pids():
        os.kill(pid, signal.SIGKILL)


def kill_worker(lab: Lab, host: int = 0, number: int = signal.SIGKILL) -> None:
    commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in lab.hosts[host].namespace.pids()}
    workers = [pid for pid, file in commands.items() if b"train.py" in file.read_bytes()]
    os.kill(workers[0], number)


def cut_link(lab: Lab, host: int = 0) -> None:
    switch = lab.switches[lab.hosts[host].rack]
    switch.ip("link", "set", f"h{host}", "down")


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("lab")
def test_twenty_kills_at_random_moments_change_no_bit() -> None:
    said = sweep("ddp", on=f"lab://{NAME}")
    print(said)
    assert not said.startswith("WRONG"), said


@pytest.mark.parametrize(
    "strategy",
    ["ddp", "zero(2)", "zero(3)", "localsgd(every=4)", 'gossip(graph="complete")'],
)
def test_workers_join_and_come_back_on_their_host_and_on_others(
    lab: Lab, tmp_path: Path, strategy: str, own_runs: dict[str, str]
) -> None:
    """One joins, one is killed, one stopped, a host is killed, the link of another one is cut."""
    is_exact = strategy.startswith(("ddp", "zero"))
    options = ["--on", f"lab://{NAME}", "-s", strategy, "-n", "3", "--elastic", "2:4"]
    options += ["--restart", "9", "--timeout", "20"]
    recipe = "tally" if is_exact else "counts"
    run = DisturbedRun(tmp_path / "run", options, workers=3, steps=STEPS, recipe=recipe)
    with run.going_on(own_runs):
        for change in (
            partial(forked.run, [sys.executable, "-m", "shoal", "join"], env=own_runs),
            partial(kill_worker, lab, 1),
            partial(kill_worker, lab, 3, signal.SIGSTOP),  # and kill it after the timeout
            partial(kill_host, lab, 0),
            partial(cut_link, lab, 2),
        ):
            run.until_all_are_there()
            before = run.log.present()
            change()
            run.workers = 4
            run.until(lambda before=before: run.log.present() != before, "change")  # type: ignore[misc]
        run.until_all_are_there()
    assert "worker 3 joined at step" in run.stderr
    for worker in range(4):
        lost = rf"worker {worker} was lost at step \d+ and came back"
        assert re.search(lost, run.stderr), run.stderr
    assert run.trains_each_sample_once()
    assert not is_exact or run.bits() == undisturbed("tally", STEPS)
