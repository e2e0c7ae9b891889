"""`shoal run`, `verify` and `compare` with a user's own schedules, by processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import scripts, user_schedules
from tests.commands.test_run import losses
from tests.scripts import json_of, shoal

BOTH = 'ddp(algorithm="mine.py:for_two") + pp(2, schedule="mine.py:zigzag")'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(scripts.DEEP)
    (tmp_path / "mine.py").write_text(user_schedules.PIPELINES + user_schedules.COLLECTIVES)
    return tmp_path


def test_run_trains_over_the_collective_of_the_user(folder: Path) -> None:
    alone = losses(shoal("run", "train.py", cwd=folder).stdout)
    strategy = 'ddp(algorithm="mine.py:two_hops")'
    done = shoal("run", "train.py", "-n", "3", "-s", strategy, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = losses(done.stdout)
    assert [step for step, _ in found] == [step for step, _ in alone]
    assert [x for _, x in found] == pytest.approx([x for _, x in alone], abs=1e-5)


def test_verify_finds_replicas_of_stages_equal(folder: Path) -> None:
    """`for_two` makes a schedule of two ranks: the four workers together do not use it."""
    words = ("train.py", "-n", "4", "-s", BOTH, "--steps", "4", "--json")
    done = shoal("verify", *words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json_of(done)
    assert document["ok"] is True and document["strategy"] == BOTH
