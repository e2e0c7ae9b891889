"""Decides what happens to a run after each event.

run ──all workers exited─────────────────────────────────────> servers: SIGTERM, 2 s, SIGKILL
 ├──a worker failed, or──> 0.3 s, in which others may fail ──┐
 │  a server exited                                          │
 │  (with replicas: 0.3 s later it is decided what the loss of it means)
 ├──Ctrl-C, SIGHUP, output failed────────────────────────────┴> SIGTERM ──> 2 s, or a
 │                                                              second Ctrl-C ──> SIGKILL
 └──SIGTERM, SIGUSR1: SIGTERM to the workers alone; they have 30 s to end a step and to save,
    then as above

Whether a worker or a server that exited with an error fails the run is decided by `policy` (see
lost_workers.py) and `server_policy` (see lost_servers.py).
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Protocol

from shoal.errors import ShoalError
from shoal.launch.here.output import LineForwarder, Write
from shoal.launch.here.processes import ProcessExit, Role
from shoal.launch.here.running import JoinRequest
from shoal.launch.losses.failures import ProcessFailure, first_failure, launch_error, read_failure
from shoal.launch.losses.lost_servers import ServerPolicy
from shoal.launch.losses.lost_workers import LossPolicy, RunResult, say_losses
from shoal.runtime import clock
from shoal.runtime.preemption import EXIT_STATUS
from shoal.runtime.preemption import SIGNALS as PREEMPTING
from shoal.runtime.run_dir import RunDir

_GRACE_S = 0.3  # after the first failure
TERM_S = 2.0  # from SIGTERM to SIGKILL

# the last is raised by `write` or `on_progress`
Event = ProcessExit | signal.Signals | JoinRequest | Exception


class Supervised(Protocol):
    """The processes of a role, wherever they run."""

    @property
    def stderr(self) -> list[LineForwarder]: ...
    def start_again(self, rank: int) -> None: ...
    def note_exit(self, rank: int) -> None: ...
    def host_of(self, rank: int) -> str: ...
    def signal_alone(self, number: signal.Signals) -> None: ...
    def signal(self, number: signal.Signals) -> None: ...


class SignalEvents:
    """While the block runs, Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP become events. Main thread only.

    A signal that is ignored (nohup, a background job) stays ignored.
    """

    def __init__(self, put: Callable[[Event], None]):
        self._put = put
        self._received: list[signal.Signals] = []
        self._handlers_before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalEvents:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGHUP, *PREEMPTING):
                handler = signal.getsignal(number)
                if handler is not None and handler != signal.SIG_IGN:
                    self._handlers_before[number] = handler
                    signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def raise_first(self) -> None:
        """Raise what the first of these signals stands for, once the run has been cleaned up."""
        for number in self._received:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(EXIT_STATUS if number in PREEMPTING else 128 + number)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._received.append(signal.Signals(number))
        self._put(signal.Signals(number))


@dataclass
class Supervisor:
    """What has happened so far, and what follows from it."""

    run_dir: RunDir
    policy: LossPolicy
    server_policy: ServerPolicy
    say: Callable[[str], None]  # a line for the user
    workers: int  # that were started
    servers: int = 0
    grace_s: float = 30.0  # for workers after SIGTERM
    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    note_state: Callable[[int, str], None] = lambda rank, state: None  # of a worker, for the table
    exits: list[ProcessExit] = field(default_factory=list)
    failed: list[ProcessExit] = field(default_factory=list)  # those of `exits` that end the run
    signals: int = 0
    first_signal: signal.Signals | None = None
    output_error: Exception | None = None  # raised by `write` or `on_progress`
    stopped_ns: int | None = None  # when the launcher began to end the processes
    ended_ns: int | None = None  # when it no longer waited for workers to save
    _start_s: float = field(default_factory=lambda: clock.monotonic())
    _held: list[ProcessExit] = field(default_factory=list)  # of servers, not decided yet
    _decide_at_s: float | None = None

    def run(self, workers: Supervised, servers: Supervised) -> None:
        """Until all workers have exited, or one has failed and the others were ended."""
        self._processes: dict[Role, Supervised] = {"worker": workers, "server": servers}
        self._until(lambda: self._workers_exited() or self._must_stop() or bool(self.failed))
        self._until(lambda: self._workers_exited() or self._must_stop(), _GRACE_S)
        self._decide_held()
        if self._all_exited():
            return
        self.stopped_ns = clock.monotonic_ns()
        if self.first_signal in PREEMPTING and not self.failed and not self.output_error:
            self._let_save(workers)
        self.ended_ns = clock.monotonic_ns()
        self.run_dir.mark(self.run_dir.ending)
        signals = self.signals
        workers.signal(signal.SIGTERM)
        servers.signal(signal.SIGTERM)
        self._until(lambda: self._all_exited() or self.signals > signals, TERM_S)
        # The rest is killed at the end of the blocks of `workers` and `servers`.

    def result(self, workers: int, signals: SignalEvents, write: Write) -> RunResult:
        """Of a run that is over; its losses are written.

        Raises what ended it: a signal, an error of the output, or the first failure.
        """
        run_dir = self.run_dir
        policy = self.policy
        server_policy = self.server_policy
        failures = self.failures({role: each.stderr for role, each in self._processes.items()})
        finished = run_dir.finished_ranks()
        if self.ends_by_signal(failures, finished):
            signals.raise_first()
        if self.output_error is not None:
            raise self.output_error
        if policy.too_few is not None:
            raise ShoalError(policy.too_few)
        if failures:
            failure = first_failure(failures)
            host = self._processes[failure.role].host_of(failure.rank)
            raise launch_error(replace(failure, host=host), finished)
        result = RunResult(
            clock.monotonic() - self._start_s,
            tuple(policy.lost),
            tuple(run_dir.read_reports(workers)),
            bool(finished),
            tuple(policy.returned()),
            tuple(server_policy.lost),
            server_policy.removed,
            tuple(policy.joined()),
            policy.absent,
        )
        say_losses(result, workers, write)
        if replicas_differ(str((report or {}).get("weights", "")) for report in result.reports):
            write(
                "shoal: the workers have ended with different weights: each has updated by a rule "
                "of its own, such as a learning rate that follows its rank or its own loss\n",
                True,
            )
        return result

    def ends_by_signal(self, failures: Sequence[ProcessFailure], finished: Sequence[int]) -> bool:
        """Whether a signal has decided how the run ended.

        After a preemption workers may still fail, for want of room to save, or come to their end.
        """
        if self.first_signal not in PREEMPTING:
            return self.signals > 0
        exits = [exit.returncode for exit in self.exits if exit.role == "worker"]
        has_finished = len(finished) == len(exits) > 0 and not any(exits)
        return not failures and not has_finished

    def _let_save(self, workers: Supervised) -> None:
        """Servers stay: workers need them to save."""
        signals = self.signals
        self.run_dir.mark(self.run_dir.preempted)
        workers.signal_alone(signal.SIGTERM)
        self._until(lambda: self._workers_exited() or self.signals > signals, self.grace_s)
        if not self._workers_exited():
            why = f"not ended within {self.grace_s:g} s (--grace)"
            why = "a second signal" if self.signals > signals else why
            self.say(f"{why}: workers are ended, and what they have not saved by now is lost")

    def failures(self, stderr: Mapping[Role, Sequence[LineForwarder]]) -> list[ProcessFailure]:
        """The failures that ended the run, without those that the launcher caused.

        Where no worker has succeeded, every exit with an error is a failure.
        """
        self._until(self.events.empty)
        succeeded = any(exit.role == "worker" and exit.returncode == 0 for exit in self.exits)
        errors = [exit for exit in self.exits if exit.returncode != 0]

        def own(exits: list[ProcessExit]) -> list[ProcessFailure]:
            failures = [
                ProcessFailure(
                    exit.rank,
                    exit.returncode,
                    exit.noticed_ns,
                    read_failure(self.run_dir, exit.rank) if exit.role == "worker" else None,
                    stderr[exit.role][exit.rank].tail(),
                    exit.role,
                    self.policy.memory_ran_out(exit),
                    self.server_policy.sentence(exit.rank) if exit.role == "server" else "",
                )
                for exit in exits
            ]
            return [failure for failure in failures if self._is_its_own(failure)]

        return own(self.failed) or ([] if succeeded else own(errors))

    def _is_its_own(self, failure: ProcessFailure) -> bool:
        """It was before the stop, or a worker that was asked to stop says why it has failed."""
        noticed_ns = failure.noticed_ns
        report = failure.report
        reported_ns = noticed_ns if report is None else report.time_ns
        if self.stopped_ns is None or min(noticed_ns, reported_ns) <= self.stopped_ns:
            return True
        is_asked = self.first_signal in PREEMPTING and noticed_ns < (self.ended_ns or 0)
        return is_asked and report is not None and not failure.is_loss

    def _until(self, done: Callable[[], bool], seconds: float | None = None) -> None:
        """Handle events until `done`, at most for so long."""
        deadline_s = None if seconds is None else clock.monotonic() + seconds
        while not done():
            ends_s = [end for end in (deadline_s, self._decide_at_s) if end is not None]
            left_s = max(0.0, min(ends_s) - clock.monotonic()) if ends_s else None
            with suppress(queue.Empty):
                self._handle(self.events.get(timeout=left_s))
                continue
            if self._decide_at_s is not None and clock.monotonic() >= self._decide_at_s:
                self._decide_held()
            elif deadline_s is not None:
                return

    def _handle(self, event: Event) -> None:
        if isinstance(event, ProcessExit):
            self.exits.append(event)
            if event.role == "worker":
                ended = "stopped" if self._must_stop() else "lost"
                self.note_state(event.rank, ended if event.returncode else "finished")
            if not self._continues_after(event):
                self.failed.append(event)
        elif isinstance(event, signal.Signals):
            self.signals += 1
            self.first_signal = self.first_signal or event
        elif isinstance(event, str):
            if not self._is_ending() and (rank := self.policy.join(event)) is not None:
                self._start_again(rank)
        else:
            self.output_error = event

    def _continues_after(self, exit: ProcessExit) -> bool:
        """Once the run is to end, it survives no loss any more, and losses are not reported.

        A server that exits with success was not needed any more.
        """
        if self._is_ending():
            return exit.returncode == 0
        if exit.role == "server":
            if not self.server_policy.note(exit):
                return self.server_policy.survives(exit)
            self._processes["server"].note_exit(exit.rank)
            if not self._held:
                self._decide_at_s = clock.monotonic() + _GRACE_S
            self._held.append(exit)
            return True
        survives = self.policy.survives(exit)
        self._processes["worker"].note_exit(exit.rank)
        if survives and exit.returncode != 0 and self.policy.restarts(exit):
            self._start_again(exit.rank)
        return survives

    def _start_again(self, rank: int) -> None:
        self.note_state(rank, "starting")
        self._processes["worker"].start_again(rank)
        self.workers += 1

    def _decide_held(self) -> None:
        """What the servers that were lost at about the same time mean for the run."""
        held = self._held
        self._held = []
        self._decide_at_s = None
        policy = self.server_policy
        if self._is_ending():
            return
        is_needed = not self._workers_exited()
        self.failed += [exit for exit in held if is_needed and not policy.survives(exit)]
        for exit in [] if self.failed else held:
            if policy.replaces(exit, is_needed):
                self._processes["server"].start_again(exit.rank)
                self.servers += 1

    def _is_ending(self) -> bool:
        return bool(self.failed) or self._must_stop() or self.stopped_ns is not None

    def _workers_exited(self) -> bool:
        return sum(exit.role == "worker" for exit in self.exits) == self.workers

    def _all_exited(self) -> bool:
        return len(self.exits) == self.workers + self.servers

    def _must_stop(self) -> bool:
        return self.signals > 0 or self.output_error is not None


def replicas_differ(texts: Iterable[str]) -> bool:
    """Whether replicas have different weights; see `Job._weights_digest`."""
    digests: dict[str, str] = {}  # by their part of a replica, and what rounding depends on
    pairs = [text.partition(" [") for text in texts]
    return any(digests.setdefault(place, digest) != digest for place, _, digest in pairs)
