"""A few of the attacks of `tests/chaos/kills.py`."""

from __future__ import annotations

import random
import signal

import pytest

from tests.chaos.kills import attack


@pytest.mark.whole
def test_runs_that_are_hit_end_name_whom_they_lost_and_leave_nothing() -> None:
    chance = random.Random(7)
    assert attack("kills", signal.SIGKILL, 2, chance) == 0
    assert attack("stops", signal.SIGSTOP, 1, chance) == 0
