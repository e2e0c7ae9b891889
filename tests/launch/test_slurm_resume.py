"""`shoal submit --slurm` on a Slurm of one machine: requeued jobs end with the same loss."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import fake_slurm
from tests.launch.helpers import ROOT
from tests.scripts import HEAD

SCRIPT = (
    HEAD
    + """
import signal, time

def strike(job):
    how = sys.argv[1]
    if job.steps == 30 and job.rank == 1 and not os.path.exists("struck"):
        open("struck", "w").close()
        if how == "limit":
            open("signal", "w").close()  # Slurm signals the batch script
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    if os.path.exists("struck"):
        time.sleep(0.02)

def train(job):
    step = job.step(model(), loss, optimizer=sgd)
    for batch in job.batches(data, batch_size=20, epochs=60):
        value = step(batch)
        if len(sys.argv) > 1 and job.steps < 300:
            strike(job)
    job.print("final", float(value), job.size)

if __name__ == "__main__":
    shoal.run(train)
"""
)


def submit(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    environ = {**os.environ, "PATH": fake_slurm.install(folder / "bin"), "PYTHONPATH": str(ROOT)}
    environ["MASTER_PORT"] = str(random.randrange(20000, 30000))
    environ["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "shoal", "submit", "--slurm", "-n", "2", *args]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


def final(done: subprocess.CompletedProcess[str]) -> float:
    found = re.search(r"^final (\S+) 2$", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and found, done.stderr
    return float(found[1])


@pytest.mark.whole
def test_after_the_time_limit_and_after_a_crash_the_loss_is_the_same(tmp_path: Path) -> None:
    expected = final(submit(tmp_path / "plain", "train.py"))
    args = ["--checkpoint", "saved:every=7", "--max-restarts", "1", "train.py", "--"]
    limit = submit(tmp_path / "limit", *args, "limit")
    assert final(limit) == expected
    assert re.search(r"preempted: stopped after step \d+; saved in", limit.stderr)
    assert "resuming from" in limit.stderr
    crash = submit(tmp_path / "crash", *args, "crash")
    assert final(crash) == expected
    assert re.search(r"resuming from \S+ after 28 steps", crash.stderr)
