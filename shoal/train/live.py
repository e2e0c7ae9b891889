"""How far this worker is, for the table of workers that the launcher shows in a terminal.

A thread looks twenty times a second whether the training thread waits, and tells the launcher
twice a second; a step does nothing for it. The threads of all workers look at the same moments
of the host's clock, so that their steps can be compared.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shoal.runtime.waits import is_waiting
from shoal.train.job import Job

_LOOK_S = 0.05
_LOOKS_PER_RECORD = 10
_LOOKS = 100  # of which the waiting share and the speed are


class _Look(NamedTuple):
    time_s: float
    steps: int
    samples: float
    waits: bool


class LiveSender:
    """The thread of one worker, while the block runs; it tells nothing before there is a job."""

    def __init__(self, rank: int, send: Callable[[Mapping[str, Any]], None]):
        self._job: Job | None = None
        self._rank = rank
        self._send = send
        self._watched = threading.get_ident()
        self._first_step: int | None = None
        self._looks: deque[_Look] = deque(maxlen=_LOOKS)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-live", daemon=True)

    def __enter__(self) -> LiveSender:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def watch(self, job: Job) -> Job:
        self._job = job
        return job

    def look(self, job: Job) -> None:
        self._first_step = job.steps if self._first_step is None else self._first_step
        if self._looks and job.steps > self._looks[0].steps == self._first_step:
            self._looks.clear()  # the first step has start-up costs: measure from its end
        waits = is_waiting(self._watched)
        self._looks.append(_Look(time.monotonic(), job.steps, job._throughput.samples, waits))

    def record(self) -> dict[str, Any]:
        first, last = self._looks[0], self._looks[-1]
        passed_s = max(last.time_s - first.time_s, 1e-9)
        recent = list(self._looks)[-_LOOKS_PER_RECORD:]
        state = "starting" if last.steps == self._first_step else "training"
        return {
            "rank": self._rank,
            "step": last.steps,
            "steps_per_s": (last.steps - first.steps) / passed_s,
            "samples_per_s": (last.samples - first.samples) / passed_s,
            "waiting": sum(look.waits for look in self._looks) / len(self._looks),
            "state": "waiting" if all(look.waits for look in recent) else state,
        }

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S - time.monotonic() % _LOOK_S):
            if self._job is not None:
                self.look(self._job)
                if round(time.monotonic() / _LOOK_S) % _LOOKS_PER_RECORD == 0:
                    self._send(self.record())
        if self._job is not None:  # the last step
            self.look(self._job)
            self._send(self.record())
