"""Workers that are killed and started again, in whole runs."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from tests.chaos.kills import RETURNING, Attack, hit_all
from tests.scripts import PLAIN, shoal


@pytest.mark.whole
@pytest.mark.parametrize("strategy", RETURNING[:3])
def test_runs_end_by_themselves_whatever_workers_are_killed(tmp_path: Path, strategy: str) -> None:
    outcome = Attack(tmp_path, strategy, random.Random(3)).kill_returning()
    assert outcome.startswith("finished after"), outcome


# worker 0 was killed and is started again before the others come
EARLY = (
    """
import os, time
if os.environ["SHOAL_RANK"] != "0":
    while not os.path.exists(os.environ["SHOAL_RUN_DIR"] + "/started-0"):
        time.sleep(0.01)
"""
    + PLAIN
)


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["hogwild", 'gossip(mode="async")'])
def test_the_first_worker_may_be_killed_before_the_others_have_come(
    tmp_path: Path, strategy: str
) -> None:
    (tmp_path / "train.py").write_text(EARLY)
    options = ["-n", "3", "-s", strategy, "--kill", "0@1", "--restart", "1"]
    ended = shoal("run", *options, "train.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "worker 0 was killed by SIGKILL" in ended.stderr


@pytest.mark.whole
def test_runs_that_are_hit_end_name_whom_they_lost_and_leave_nothing() -> None:
    chance = random.Random(7)
    assert hit_all(2, signal.SIGKILL, chance) == 0
    assert hit_all(1, signal.SIGSTOP, chance) == 0
