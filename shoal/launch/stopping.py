"""Stop runs of this user from another process: as a preemption does, or at once.

    shoal stop          SIGTERM to the launcher: workers end their step, and save where they save
    shoal stop --now    SIGTERM again and again: workers are ended; SIGKILL where it does not end

A launcher that is a notebook stays: its workers are asked instead.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from shoal.launch.running import RunEntry
from shoal.runtime.waits import Backoff

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.2
_NOW_S = 10.0


@dataclass(frozen=True)
class StoppedRun:
    """How a run ended that was asked to."""

    name: str
    steps: int | None
    has_ended: bool
    was_killed: bool = False

    def __str__(self) -> str:
        at = "before its first step" if self.steps is None else f"after step {self.steps}"
        if not self.has_ended:
            return f"{self.name} has not ended yet: shoal stop {self.name} --now ends it"
        return f"{self.name} was killed {at}" if self.was_killed else f"{self.name} has ended {at}"


def stop_run(entry: RunEntry, now: bool, limit_s: float) -> StoppedRun:
    """Ask the run to end and wait, at most for so long; with `now` it is killed then."""
    pause = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    steps = entry.steps
    _ask(entry, now)
    deadline_s = time.monotonic() + (_NOW_S if now else limit_s)
    was_killed = False
    while entry.is_there:
        steps = entry.steps or steps
        if now and not entry.session:
            _send([entry.launcher_pid], signal.SIGTERM)  # the second one ends the grace
        if time.monotonic() > deadline_s:
            if not now or was_killed:
                return StoppedRun(entry.name, steps, False)
            _send(entry.session or [entry.launcher_pid], signal.SIGKILL)
            was_killed = True
            deadline_s = time.monotonic() + _NOW_S
        pause()
    return StoppedRun(entry.name, steps, True, now)


def _ask(entry: RunEntry, now: bool) -> None:
    if not entry.session:
        _send([entry.launcher_pid], signal.SIGTERM)
        return
    if not now:
        entry.run_dir.mark_preempted()
    _send(entry.session, signal.SIGKILL if now else signal.SIGTERM)


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
