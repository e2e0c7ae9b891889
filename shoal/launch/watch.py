"""What happens to a run, and what follows from it.

run ──all ended──────────────────────────────────────────────> end
 ├──a worker failed──> 0.3 s, in which others may fail too ──┐
 └──Ctrl-C, SIGTERM, SIGHUP, output broken───────────────────┴> SIGTERM ──> 2 s, or a
                                                                second Ctrl-C ──> SIGKILL
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.launch.crew import Crew, Exit
from shoal.launch.failures import Death, read_report
from shoal.launch.output import Lines

_GRACE_S = 0.3  # after the first bad exit
_TERM_S = 2.0  # from SIGTERM to SIGKILL

Event = Exit | signal.Signals | Exception  # the last is raised by `write` or `on_progress`


class Interrupts:
    """While the block runs, Ctrl-C, SIGTERM and SIGHUP become events. Main thread only.

    A signal that is ignored (nohup, a background job) stays ignored.
    """

    def __init__(self, put: Callable[[Event], None]):
        self._put = put
        self._received: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                handler = signal.getsignal(number)
                if handler is not None and handler != signal.SIG_IGN:
                    self._before[number] = handler
                    signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def raise_first(self) -> None:
        """What the first of these signals would have done, had we not cleaned up before."""
        for number in self._received:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + number)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._received.append(signal.Signals(number))
        self._put(signal.Signals(number))


@dataclass
class Watch:
    """What has happened so far, and what follows from it."""

    workers: int
    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    exits: list[Exit] = field(default_factory=list)
    signals: int = 0
    broken: Exception | None = None  # raised by `write` or `on_progress`
    stopped_ns: int | None = None  # when we began to end workers

    def run(self, crew: Crew) -> None:
        """Until all workers have ended, or one has failed and the others were made to end."""
        self._until(lambda: self._all_ended() or self._must_stop() or self._some_failed())
        self._until(lambda: self._all_ended() or self._must_stop(), _GRACE_S)
        if self._all_ended():
            return
        self.stopped_ns, signals = time.monotonic_ns(), self.signals
        crew.signal(signal.SIGTERM)
        self._until(lambda: self._all_ended() or self.signals > signals, _TERM_S)
        # Those that are left are killed at the end of the crew's block.

    def deaths(self, run_dir: Path, errors: Sequence[Lines]) -> list[Death]:
        """The workers that ended badly, except for those that did because we ended them."""
        self._until(self.events.empty)
        deaths = [
            Death(*exit, read_report(run_dir, exit.rank), errors[exit.rank].tail())
            for exit in self.exits
            if exit.returncode != 0
        ]
        return [death for death in deaths if self._was_before_stop(death)]

    def _was_before_stop(self, death: Death) -> bool:
        reported_ns = death.noticed_ns if death.report is None else death.report.time_ns
        return self.stopped_ns is None or min(death.noticed_ns, reported_ns) < self.stopped_ns

    def _until(self, done: Callable[[], bool], seconds: float | None = None) -> None:
        """Take events until `done`, at most for so long."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not done():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                event = self.events.get(timeout=left)
            except queue.Empty:
                return
            self._take(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, Exit):
            self.exits.append(event)
        elif isinstance(event, signal.Signals):
            self.signals += 1
        else:
            self.broken = event

    def _all_ended(self) -> bool:
        return len(self.exits) == self.workers

    def _must_stop(self) -> bool:
        return self.signals > 0 or self.broken is not None

    def _some_failed(self) -> bool:
        return any(exit.returncode != 0 for exit in self.exits)
