"""How fast a rank has trained, for the report of a run."""

from __future__ import annotations

import time


class Pace:
    """Samples of this rank, and steps of the job; speeds from the end of its first step on."""

    def __init__(self) -> None:
        self.samples = self._steps = self._first_samples = self._first_steps = 0
        self._first_s = self._last_s = 0.0

    def note(self, steps: int = 1) -> None:
        """A step has ended, which counts as `steps` where replicas take batches in turns."""
        self._last_s = time.monotonic()
        if not self._steps:
            self._first_s, self._first_samples = self._last_s, self.samples
            self._first_steps = steps
        self._steps += steps

    def read(self) -> dict[str, float | None]:
        seconds, counted = self._last_s - self._first_s, self.samples - self._first_samples
        return {
            "seconds": seconds,
            "samples": self.samples,
            "steps_per_s": (self._steps - self._first_steps) / seconds if seconds > 0 else None,
            "samples_per_s": counted / seconds if seconds > 0 else None,
        }
