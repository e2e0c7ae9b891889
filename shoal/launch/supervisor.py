"""What happens to a run, and what follows from it.

run ──all workers ended──────────────────────────────────────> servers: SIGTERM, 2 s, SIGKILL
 ├──a worker failed, or──> 0.3 s, in which others may fail ──┐
 │  a server ended                                           │
 └──Ctrl-C, SIGTERM, SIGHUP, output broken───────────────────┴> SIGTERM ──> 2 s, or a
                                                                second Ctrl-C ──> SIGKILL

Whether a worker that ended badly has failed the run is decided by `survives` (see `losses`).
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.launch.failures import Death, read_report
from shoal.launch.output import Lines
from shoal.launch.processes import Crew, Exit, Role

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
    servers: int = 0
    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    exits: list[Exit] = field(default_factory=list)
    failed: list[Exit] = field(default_factory=list)  # those of `exits` that end the run
    signals: int = 0
    broken: Exception | None = None  # raised by `write` or `on_progress`
    stopped_ns: int | None = None  # when we began to end workers
    survives: Callable[[Exit], bool] | None = None

    def run(self, crew: Crew, servers: Crew, survives: Callable[[Exit], bool]) -> None:
        """Until all workers have ended, or one has failed and the others were made to end."""
        self.survives = survives
        self._until(lambda: self._workers_ended() or self._must_stop() or bool(self.failed))
        self._until(lambda: self._workers_ended() or self._must_stop(), _GRACE_S)
        if self._all_ended():
            return
        self.stopped_ns = time.monotonic_ns()
        signals = self.signals
        crew.signal(signal.SIGTERM)
        servers.signal(signal.SIGTERM)
        self._until(lambda: self._all_ended() or self.signals > signals, _TERM_S)
        # Those that are left are killed at the end of the crew's block.

    def deaths(self, run_dir: Path, errors: Mapping[Role, Sequence[Lines]]) -> list[Death]:
        """Those that ended the run, except for those that ended because we ended them.

        When no worker has ended well, it is all that ended badly: there is nobody to go on.
        """
        self._until(self.events.empty)
        some_finished = any(exit.role == "worker" and exit.returncode == 0 for exit in self.exits)
        bad = [exit for exit in self.exits if exit.returncode != 0]
        deaths = [
            Death(
                exit.rank,
                exit.returncode,
                exit.noticed_ns,
                read_report(run_dir, exit.rank) if exit.role == "worker" else None,
                errors[exit.role][exit.rank].tail(),
                exit.role,
            )
            for exit in (self.failed if some_finished or self.failed else bad)
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
            if not self._goes_on_after(event):
                self.failed.append(event)
        elif isinstance(event, signal.Signals):
            self.signals += 1
        else:
            self.broken = event

    def _goes_on_after(self, exit: Exit) -> bool:
        """Once the run is to end, nobody goes on, and losses are no longer told.

        A server that ends well has been told that it is not needed any more.
        """
        ending = self.failed or self._must_stop() or self.stopped_ns is not None
        if exit.role == "server" or ending or self.survives is None:
            return exit.returncode == 0
        return self.survives(exit)

    def _workers_ended(self) -> bool:
        return sum(exit.role == "worker" for exit in self.exits) == self.workers

    def _all_ended(self) -> bool:
        return len(self.exits) == self.workers + self.servers

    def _must_stop(self) -> bool:
        return self.signals > 0 or self.broken is not None
