"""`shoal submit --slurm` on a Slurm of one machine: requeued jobs end with the same loss."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import fake_slurm
from tests.launch.resuming import (
    CHECKPOINT,
    environ,
    final,
    free_port,
    undisturbed,
    write_script,
)


def submit(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    write_script(folder)
    path = fake_slurm.install(folder / "bin")
    variables = environ(PATH=path, MASTER_PORT=str(free_port()))
    command = [sys.executable, "-m", "shoal", "submit", "--slurm", "-n", "2", *args]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("file-signal", r"preempted: stopped after step \d+; saved in"),  # the time limit is near
        ("file-preempt", r"preempted: stopped after step \d+; saved in"),
        ("rank-SIGKILL", r"resuming from \S+ after 28 steps"),
    ],
)
def test_after_a_preemption_and_after_a_crash_the_loss_is_the_same(
    tmp_path: Path, what: str, sentence: str
) -> None:
    expected = undisturbed(tmp_path / "plain")
    args = ["--checkpoint", CHECKPOINT, "--max-restarts", "1", "train.py", "--", what, "1"]
    done = submit(tmp_path / "job", *args)
    assert final(done, 2) == expected
    assert re.search(sentence, done.stderr)
    assert "resuming from" in done.stderr
