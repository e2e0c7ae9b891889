"""How far a run is."""

from __future__ import annotations

import io
import json
import os
from typing import Any

import pytest

from shoal.train import progress
from shoal.train.progress import (
    Progress,
    ProgressBar,
    ProgressLines,
    ProgressSender,
    clock,
    details,
    for_worker,
    line,
    open_progress,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def time_s(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    return clock


def steps_shown(total: int | None, until: int) -> list[int]:
    lines = ProgressLines(io.StringIO())
    shown = []
    for step in range(1, until + 1):
        if lines.due(step, total):
            lines.show({"step": step, "total": total, "metrics": {}})
            shown.append(step)
    return shown


@pytest.mark.usefixtures("time_s")
def test_lines_come_at_fixed_steps() -> None:
    assert steps_shown(100, 100) == [1, *range(5, 101, 5)]
    assert steps_shown(47, 47) == [1, *range(2, 47, 2), 47]
    assert steps_shown(7, 7) == [1, 2, 3, 4, 5, 6, 7]
    assert steps_shown(1, 1) == [1]
    assert steps_shown(None, 160) == [1, 50, 100, 150]


def test_no_line_is_waited_for_longer_than_half_a_minute(time_s: Clock) -> None:
    lines = ProgressLines(io.StringIO())
    assert not lines.due(3, 1000)
    time_s.now_s += 31
    assert lines.due(4, 1000)
    lines.show({"step": 4, "total": 1000})
    assert not lines.due(5, 1000)


def test_the_text_of_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    record: dict[str, Any] = {
        "step": 3,
        "total": 10,
        "metrics": {"loss": 0.123456789, "accuracy": 1.0, "lr": 1e-05, "phase": "warm-up"},
        "samples_per_s": 12345.6,
        "left_s": 61.0,
    }
    out = io.StringIO()
    for place in (out, None):
        ProgressLines(place).show(record)
    assert (
        out.getvalue()
        == capsys.readouterr().out
        == (
            "step 3/10  loss 0.123457  accuracy 1  lr 1e-05  phase warm-up  12,346 samples/s  "
            "1:01 left\n"
        )
    )
    assert line({**record, "total": None, "left_s": None}).startswith("step 3  loss 0.123457")
    assert details({}) == ""


def test_the_clock_shows_hours_only_if_there_are_any() -> None:
    seconds = (0, 59.6, 61, 3599.9, 3661, 360_000)
    texts = ["0:00", "1:00", "1:01", "1:00:00", "1:01:01", "100:00:00"]
    assert [clock(one) for one in seconds] == texts


def test_records_for_the_launcher_come_ten_times_a_second_and_at_the_end(time_s: Clock) -> None:
    sent: list[Any] = []
    remote = ProgressSender(sent.append)
    assert remote.due(1, 100)
    remote.show({"step": 1})
    assert not remote.due(2, 100)
    time_s.now_s += 0.11
    assert remote.due(3, 100)
    remote.show({"step": 3})
    assert remote.due(100, 100)
    assert sent == [{"step": 1}, {"step": 3}]
    remote.close()


def test_only_rank_0_shows_anything_unless_others_may_be_the_first_one_left() -> None:
    sent: list[Any] = []
    assert isinstance(for_worker(0, 8, sent.append), ProgressSender)
    assert isinstance(for_worker(0, 8, None), ProgressLines)
    for rank in (1, 7):
        assert type(for_worker(rank, 8, sent.append)) is Progress
    assert isinstance(for_worker(1, 8, sent.append, takes_over=True), ProgressSender)
    assert isinstance(for_worker(1, 8, None, takes_over=True), ProgressLines)


def test_a_terminal_gets_a_bar_that_is_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.sys.stdout, "isatty", lambda: True, raising=False)
    bar = for_worker(0, 1, None)
    assert isinstance(bar, ProgressBar)
    assert bar.due(1, 10)
    bar.show({"step": 1, "total": 10, "metrics": {"loss": 0.5}})
    bar.print("a line above [the] bar")
    bar.show({"step": 2, "total": None, "metrics": {}})
    assert bar.due(10, 10)
    bar.close()
    for_worker(0, 1, None).close()  # one that has shown nothing
    assert isinstance(for_worker(0, 2, None), ProgressLines)  # the terminal is shared


def test_progress_is_a_json_line_and_never_waits() -> None:
    assert open_progress(None) is None
    read, write = os.pipe()
    send = open_progress(write)
    assert send is not None
    send({"step": 1, "metrics": {"loss": 0.5}})
    assert json.loads(os.read(read, 1000)) == {"step": 1, "metrics": {"loss": 0.5}}
    for step in range(50):
        send({"step": step, "pad": "x" * 5000})  # more than a pipe holds
    torn = os.read(read, 2**20)
    send({"step": 99})
    assert json.loads((torn + os.read(read, 1000)).splitlines()[-1]) == {"step": 99}
    os.close(read)
    send({"step": 100})
    os.close(write)
