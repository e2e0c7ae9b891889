"""A few of the attacks of `make chaos` on checkpoints."""

from __future__ import annotations

import pytest

from tests.chaos import checkpoint_damage, save_kills


def test_damaged_checkpoints_are_refused_or_give_the_right_state() -> None:
    assert checkpoint_damage.main(["--count", "24"]) == 0


def test_killed_saves_leave_one_whole_checkpoint(capfd: pytest.CaptureFixture[str]) -> None:
    assert save_kills.main(["--count", "3"]) == 0, capfd.readouterr().out
