"""SIGTERM before the first step, in an evaluation, twice, or with a full disk: one outcome each."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.launch.here.output import LineForwarder, print_lines
from shoal.launch.here.process_config import SINGLE_COPY
from shoal.launch.here.processes import ProcessExit
from shoal.launch.here.supervisor import Supervisor
from shoal.launch.losses.failures import FailureReport, write_failure
from shoal.launch.losses.lost_servers import ServerPolicy
from shoal.launch.losses.lost_workers import LossPolicy
from shoal.runtime.run_dir import RunDir
from tests.scripts import HEAD, shoal

SCRIPT = (
    HEAD
    + """
import signal, time
from shoal.train.checkpoints import files as checkpoint

when = sys.argv[1]
is_first_start = not os.path.exists("struck")
write = checkpoint.write

def strike(job_rank=0):
    if is_first_start and job_rank == 0:
        open("struck", "w").close()
        os.kill(os.getppid(), signal.SIGTERM)

def write_late(path, saved):
    if os.path.exists("struck") and is_first_start and when == "second":
        strike()
        time.sleep(60)
    if os.path.exists("struck") and is_first_start and when == "full":
        raise OSError(28, "No space left on device")
    write(path, saved)

checkpoint.write = write_late

def train(job):
    if when == "early":
        strike(job.rank)
    def metric(outputs, targets):
        if not os.path.exists("struck"):
            strike(job.rank)
        return (outputs.argmax(1) == targets).float().mean()
    step = job.step(model(), loss, optimizer=sgd)
    for batch in job.batches(data, batch_size=20, epochs=8):
        value = step(batch)
        if job.steps == 12 and when in ("second", "full"):
            strike(job.rank)
        if job.steps == 12 and when == "evaluation":
            job.evaluate(metric, data)
        if is_first_start:
            time.sleep(0.05)
    if when == "end":
        job.evaluate(metric, data)
    job.print("final", float(value))

if __name__ == "__main__":
    shoal.run(train)
"""
)


def run(folder: Path, when: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    words = ["run", "-n", "2", "--checkpoint", "saved:every=10", "train.py", when]
    return shoal(*words, cwd=folder)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("when", "status", "sentence", "saved"),
    [
        ("early", 143, "preempted before the first step: there is nothing to save", None),
        ("evaluation", 143, "preempted: stopped after step 13; saved in", 13),
        ("end", 0, "", 40),  # it has come to its end: a requeued job would do it again
        ("second", 143, "a second signal: workers are ended, and what they have not saved", 10),
        ("full", 1, "No space left on device", 10),
    ],
)
def test_a_signal_at_any_time_has_one_outcome(
    tmp_path: Path, when: str, status: int, sentence: str, saved: int | None
) -> None:
    struck = run(tmp_path, when)
    assert (struck.returncode, sentence in struck.stderr) == (status, True), struck.stderr
    manifest = tmp_path / "saved" / "manifest.json"
    steps = json.loads(manifest.read_text())["steps"] if manifest.exists() else None
    assert steps == saved
    resumed = run(tmp_path, when)
    assert "final" in resumed.stdout, resumed.stderr
    assert (saved is None) == ("no checkpoint is in" in resumed.stderr)


def end_of(run_dir: RunDir, *statuses: int, finished: Sequence[int] = ()) -> str:
    """Of a run of two workers that got SIGTERM, and ended with these."""
    policy = LossPolicy(run_dir, 2, None, print)
    run = Supervisor(run_dir, policy, ServerPolicy(0, SINGLE_COPY, print), print, 2)
    run.first_signal, run.signals = signal.SIGTERM, 1
    run.stopped_ns, run.ended_ns = 100, 300
    run.exits = [ProcessExit(rank, status, 200) for rank, status in enumerate(statuses)]
    run.failed = [exit for exit in run.exits if exit.returncode]
    failures = run.failures({"worker": [LineForwarder(print_lines, "", True)] * 2})
    if run.ends_by_signal(failures, finished):
        return "preempted"
    return "failed" if failures else "finished"


def test_workers_that_were_asked_to_stop_may_fail_to_save_or_finish(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert end_of(run_dir, 143, 143, finished=(0, 1)) == "preempted"
    assert end_of(run_dir, 0, 0, finished=(0, 1)) == "finished"
    assert end_of(run_dir, 0, 0) == "preempted"  # handlers of a script without shoal.run
    assert end_of(run_dir, 0, 143, finished=(0,)) == "preempted"
    assert end_of(run_dir) == "preempted"  # before any worker was started
    write_failure(run_dir, 1, FailureReport(250, 1, "", "", lost_peer=True))
    assert end_of(run_dir, -15, 1) == "preempted"  # the loss of the other one
    write_failure(run_dir, 0, FailureReport(250, 2, "cannot save: the disk is full", ""))
    assert end_of(run_dir, 2, 1) == "failed"
