"""Workers that are killed and started again, in whole runs."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.chaos.kills import RETURNING, Attack, hit_all
from tests.launch.helpers import ROOT


@pytest.mark.whole
@pytest.mark.parametrize("strategy", RETURNING[:3])
def test_runs_end_by_themselves_whatever_workers_are_killed(tmp_path: Path, strategy: str) -> None:
    outcome = Attack(tmp_path, strategy, random.Random(3)).kill_returning()
    assert outcome.startswith("finished after"), outcome


EARLY = """
import os, time, torch, shoal
from functools import partial

folder = os.environ["SHOAL_RUN_DIR"]
if os.environ["SHOAL_RANK"] != "0":
    while not os.path.exists(f"{folder}/started-0"):  # worker 0 was killed and is started again
        time.sleep(0.01)

def train(job):
    data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.arange(48) % 3)
    step = job.step(torch.nn.Linear(6, 3), torch.nn.functional.cross_entropy,
                    optimizer=partial(torch.optim.SGD, lr=0.05))
    for batch in job.batches(data, batch_size=24, epochs=10):
        step(batch)

shoal.run(train)
"""


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["hogwild", 'gossip(mode="async")'])
def test_the_first_worker_may_be_killed_before_the_others_have_come(
    tmp_path: Path, strategy: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(EARLY)
    command = [sys.executable, "-m", "shoal", "run", str(script), "-n", "3", "-s", strategy]
    command += ["--kill", "0@1", "--restart", "1"]
    ended = forked.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert "worker 0 was killed by SIGKILL" in ended.stderr


@pytest.mark.whole
def test_runs_that_are_hit_end_name_whom_they_lost_and_leave_nothing() -> None:
    chance = random.Random(7)
    assert hit_all(2, signal.SIGKILL, chance) == 0
    assert hit_all(1, signal.SIGSTOP, chance) == 0
