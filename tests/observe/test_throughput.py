"""Speeds of a rank, from a clock that the test turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.runtime.config import RunConfig
from shoal.runtime.files import StepCount
from shoal.runtime.run_dir import RunDir
from shoal.train.step.run_services import RunServices
from shoal.train.throughput import Throughput


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now_s = 100.0
        monkeypatch.setattr(
            "shoal.train.throughput.clock.monotonic_ns", lambda: int(self.now_s * 1e9)
        )


def test_speeds_leave_out_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    meter = Throughput()
    for step in range(10):
        clock.now_s += 50.0 if step < 2 else 0.5  # two slow ones at the start
        meter.add_samples(job=16, rank=8)
        meter.end_step()
    found = meter.report()
    assert found["samples"] == 80
    assert found["steps_per_s"] == pytest.approx(2.0)
    assert found["samples_per_s"] == pytest.approx(16.0)
    assert found["measured_ns"] == [200_500_000_000, 204_000_000_000]
    assert meter.report(200_000_000_000)["measured_ns"] == [500_000_000, 4_000_000_000]


@pytest.mark.parametrize("steps", [0, 1])
def test_without_a_second_step_there_is_no_speed(steps: int) -> None:
    meter = Throughput()
    for _ in range(steps):
        meter.end_step()
    found = meter.report()
    assert found["steps_per_s"] is found["samples_per_s"] is found["measured_ns"] is None


def test_a_long_run_keeps_few_marks_and_the_same_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    meter = Throughput()
    for _ in range(10_001):
        clock.now_s += 0.25
        meter.add_samples(job=4, rank=2)
        meter.end_step(3)
    assert len(meter._marks) <= 512
    found = meter.report()
    assert found["steps_per_s"] == pytest.approx(12.0)
    assert found["samples_per_s"] == pytest.approx(8.0)
    assert found["seconds"] == pytest.approx(0.8 * 2500, rel=0.01)


def test_progress_is_measured_from_the_end_of_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    meter = Throughput()
    unknown = {"samples_per_s": None, "left_s": None}
    for step in range(1, 6):
        clock.now_s += 50.0 if step == 1 else 0.5  # the first one starts everything up
        meter.add_samples(job=16, rank=8)
        shown = meter.progress(step, 11)
        assert (shown == unknown) is (step == 1)
    assert shown["samples_per_s"] == pytest.approx(32.0)
    assert shown["left_s"] == pytest.approx(3.0)
    assert meter.progress(5, None)["left_s"] is None
    meter.restart()
    assert meter.progress(5, 11) == unknown


def test_a_skipped_step_has_no_samples() -> None:
    meter = Throughput()
    meter.add_samples(job=16, rank=8)
    meter.recount_samples(8, 0)
    assert meter.report()["samples"] == 0


def test_progress_counts_the_samples_of_the_ranks_that_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock(monkeypatch)
    meter = Throughput()
    run_dir = RunDir(tmp_path)
    count = StepCount(run_dir.steps(0))
    services = RunServices(step_count=count, config=RunConfig(run_dir=run_dir))
    assert services.present(4) == 1.0
    meter.progress(1, 11)
    for exited in range(4):
        clock.now_s += 1.0
        meter.present = services.present(4)
        meter.add_samples(job=16, rank=4)
        run_dir.note_exit(exited, -9)
    assert meter.progress(5, 11)["samples_per_s"] == (16 + 12 + 8 + 4) / 4
    count.close()
