"""Speeds of a rank, from a clock that the test turns."""

from __future__ import annotations

import pytest

from shoal.observe.throughput import Pace


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now_s = 100.0
        monkeypatch.setattr(
            "shoal.observe.throughput.time.monotonic_ns", lambda: int(self.now_s * 1e9)
        )


def test_speeds_leave_out_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = Pace()
    for step in range(10):
        clock.now_s += 50.0 if step < 2 else 0.5  # two slow ones at the start
        pace.samples += 8
        pace.note()
    found = pace.read()
    assert found["samples"] == 80
    assert found["steps_per_s"] == pytest.approx(2.0)
    assert found["samples_per_s"] == pytest.approx(16.0)
    assert found["measured_ns"] == [200_500_000_000, 204_000_000_000]
    assert pace.read(200_000_000_000)["measured_ns"] == [500_000_000, 4_000_000_000]


@pytest.mark.parametrize("steps", [0, 1])
def test_without_a_second_step_there_is_no_speed(steps: int) -> None:
    pace = Pace()
    for _ in range(steps):
        pace.note()
    found = pace.read()
    assert found["steps_per_s"] is found["samples_per_s"] is found["measured_ns"] is None


def test_a_long_run_keeps_few_marks_and_the_same_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = Pace()
    for _ in range(10_001):
        clock.now_s += 0.25
        pace.samples += 2
        pace.note(3)
    assert len(pace._marks) <= 512
    found = pace.read()
    assert found["steps_per_s"] == pytest.approx(12.0)
    assert found["samples_per_s"] == pytest.approx(8.0)
    assert found["seconds"] == pytest.approx(0.8 * 2500, rel=0.01)
