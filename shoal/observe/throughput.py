"""How fast a rank has trained, for the report of a run."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

_MOST_MARKS = 512
_START = 0.2  # the share of steps in which workers that started late catch up


class Mark(NamedTuple):
    """The end of a step: when, and what had been done by then."""

    time_ns: int
    steps: int
    samples: int


class Pace:
    """Samples of this rank, and steps of the job; speeds without the first fifth of the steps."""

    def __init__(self) -> None:
        self.samples = self._steps = self._calls = 0
        self._every = 1
        self._marks: list[Mark] = []
        self._last: Mark | None = None

    def note(self, steps: int = 1) -> None:
        """A step has ended, which counts as `steps` where replicas take batches in turns."""
        self._steps += steps
        self._calls += 1
        self._last = Mark(time.monotonic_ns(), self._steps, self.samples)
        if self._calls % self._every:
            return
        self._marks.append(self._last)
        if len(self._marks) > _MOST_MARKS:  # every other one will do
            self._marks = self._marks[1::2]
            self._every = 2 * self._every

    def read(self, origin_ns: int = 0) -> dict[str, Any]:
        """`measured_ns` is when speeds were measured, on the clock of a trace with that origin."""
        first = self._settled()
        last = self._last
        seconds = 0.0 if first is None or last is None else (last.time_ns - first.time_ns) / 1e9
        found: dict[str, Any] = {"seconds": seconds, "samples": self.samples}
        if first is None or last is None or seconds <= 0:
            return {**found, "steps_per_s": None, "samples_per_s": None, "measured_ns": None}
        return {
            **found,
            "steps_per_s": (last.steps - first.steps) / seconds,
            "samples_per_s": (last.samples - first.samples) / seconds,
            "measured_ns": [first.time_ns - origin_ns, last.time_ns - origin_ns],
        }

    def _settled(self) -> Mark | None:
        return self._marks[int(_START * len(self._marks))] if self._marks else None
