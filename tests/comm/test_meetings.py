"""Meetings of workers of which some come back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shoal.comm.members.board import FileBoard, GroupMember
from shoal.comm.members.meetings import Meeting, Meetings
from shoal.errors import CheckpointError, PeerLost


class Lives:
    """Which processes have ended; makes the view of each."""

    def __init__(self, folder: Path, size: int):
        self.file = folder / "meetings"
        self.size = size
        self.ended: set[tuple[int, int]] = set()

    def of(self, rank: int, incarnation: int = 0, patience_s: float = 20.0) -> Meetings:
        board = FileBoard(self.file)
        board.has_exited = self.ended.__contains__  # type: ignore[method-assign]
        return Meetings(board, GroupMember(rank, incarnation), self.size, patience_s)

    def back(self, rank: int, steps: int, patience_s: float = 20.0) -> Meetings:
        """The second process of a rank, which goes on with this step."""
        self.ended.add((rank, 0))
        worker = self.of(rank, 1, patience_s)
        assert worker.is_away and worker.take_place(lambda: steps) == steps and not worker.is_away
        return worker


def never(_: Meeting) -> Any:
    raise AssertionError("it takes no part")


def incarnations(meeting: Meeting) -> list[int]:
    return list(meeting.incarnations)


def test_all_take_part_at_first_and_meetings_of_one_step_are_counted(tmp_path: Path) -> None:
    lives = Lives(tmp_path, 3)
    for rank in range(3):
        worker = lives.of(rank)
        names = [worker.hold(steps, lambda meeting: meeting.name) for steps in (0, 0, 7, 7, 9)]
        assert names == ["0.0.0", "0.1.0", "7.0.0", "7.1.0", "9.0.0"]


def test_numbers_grow() -> None:
    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 65535, 63), (1, 0, 0), (10**9, 0, 0)]
    numbers = [Meeting((s, o), attempt, ()).number for s, o, attempt in keys]
    assert numbers == sorted(numbers) and numbers[0] >= 1 << 30 and numbers[-1] < 1 << 62


def test_one_that_comes_back_gets_past_results_and_takes_part_in_later_steps(
    tmp_path: Path,
) -> None:
    lives = Lives(tmp_path, 2)
    zero = lives.of(0)
    assert zero.hold(10, incarnations) == [0, 0]
    again = lives.back(1, 10)
    assert again.hold(10, never) == [0, 0]
    assert zero.hold(20, incarnations) == again.hold(20, incarnations) == [0, 1]


def test_it_takes_no_part_in_a_meeting_of_the_step_that_it_goes_on_with(tmp_path: Path) -> None:
    """Its script may never call that one: in a loop it comes after the step."""
    lives = Lives(tmp_path, 2)
    again = lives.back(1, 10)
    assert lives.of(0).hold(10, incarnations) == [0, -1]
    assert again.hold(10, never) == [0, -1]


def test_a_meeting_keeps_those_with_whom_it_began(tmp_path: Path) -> None:
    lives = Lives(tmp_path, 3)
    zero, two = lives.of(0), lives.of(2)
    again = lives.of(1, 1)

    def comes_back_meanwhile(meeting: Meeting) -> list[int]:
        assert not zero.is_missing(1)
        lives.ended.add((1, 0))
        assert zero.is_missing(1) and not zero.is_missing(2)
        again.take_place(lambda: 4)
        assert zero.is_missing(1), "the process that came back is another one"
        return incarnations(meeting)

    assert zero.hold(5, comes_back_meanwhile) == two.hold(5, incarnations) == [0, 0, 0]
    assert again.hold(5, never) == [0, 0, 0]


def test_those_who_came_back_meet_when_all_others_are_gone(tmp_path: Path) -> None:
    lives = Lives(tmp_path, 2)

    def dies(_: Meeting) -> None:
        lives.ended.update({(0, 0), (1, 0)})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lives.of(0).hold(10, dies)
    both = [lives.back(rank, 10) for rank in range(2)]
    names = [worker.hold(10, lambda m: [m.name, *m.incarnations]) for worker in both]
    assert names == [["10.0.1", 1, 1]] * 2


def test_it_waits_for_the_result_of_others(tmp_path: Path) -> None:
    lives = Lives(tmp_path, 2)
    again = lives.back(1, 3)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(again.hold, 3, never)
        lives.of(0).hold(3, lambda _: {"accuracy": 0.5})
        assert got.result(60) == {"accuracy": 0.5}


def test_a_failure_is_one_for_all_and_waiting_has_an_end(tmp_path: Path) -> None:
    lives = Lives(tmp_path, 2)
    again = lives.back(1, 3, patience_s=0.01)

    def fails(_: Meeting) -> None:
        raise CheckpointError("the disk is full")

    with pytest.raises(CheckpointError):
        lives.of(0).hold(3, fails)
    with pytest.raises(CheckpointError, match="the disk is full"):
        again.hold(3, never)
    with pytest.raises(PeerLost, match="a meeting at step 2"):
        again.hold(2, never)


def test_lines_that_a_killed_process_left_incomplete_are_not_read(tmp_path: Path) -> None:
    lives = Lives(tmp_path, 1)
    lives.of(0).hold(1, lambda _: 1)
    with lives.file.open("ab") as file:
        file.write(b'{"at": [2, 0], "resu')
    worker = lives.of(0)
    assert worker.hold(1, lambda _: 1) == 1 and worker.hold(2, lambda _: 2) == 2
