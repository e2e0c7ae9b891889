"""SIGTERM as a request: the running step ends, a checkpoint is saved, the exit status is 143.

    launcher   SIGTERM: marks the run as preempted, SIGTERM to the workers, 30 s, SIGKILL
    first rank chooses the step after which all ranks stop, and writes it on the board
    each rank  stops there, between two batches

The board is the run directory; under other launchers it is the store of torch.distributed, and a
signal to one rank is enough. SIGUSR1, which Slurm sends before the end of a job (`--signal`), asks
for the same.

Where replicas take every step together, the first rank chooses its next step: no other rank can
have ended that one, since it takes part in it. Elsewhere all ranks say first how far they are, and
it chooses a step that none of them has reached.

A rank that still waits for its servers or for the others, before the first step, ends at once. A
script that has a handler of its own keeps it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Protocol

from shoal.runtime.run_dir import RunDir
from shoal.runtime.wording import say

_PATIENCE_S = 1.0  # for the launcher's mark
_POLL_S = 0.02


class StopBoard(Protocol):
    """What ranks write for each other. A step that is written is never changed."""

    def announce(self) -> bool:
        """This process got the signal. False: it is for this process alone, which ends."""

    def all_heard(self) -> bool:
        """Whether every rank looks for the last step before it begins another one."""

    def last_step(self) -> int | None:
        """The step after which all ranks stop; None as long as it is not chosen."""

    def write_last_step(self, steps: int) -> None: ...

    def note_step(self, rank: int, steps: int) -> None: ...

    def noted_steps(self) -> dict[int, int]: ...

    def has_exited(self, rank: int) -> bool: ...


class LauncherBoard(RunDir):
    """The run directory, where the launcher marks that the run is preempted."""

    def announce(self) -> bool:
        """A signal to all processes of a job may come here before the launcher has marked it."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while not self.preempted.exists():
            if self.ending.exists() or time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def all_heard(self) -> bool:
        return True  # a rank reads the file before every step


SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_STATUS = 128 + signal.SIGTERM  # after either of them
NO_GRACE_S = 0.01  # from SIGTERM to SIGKILL, for workers that save nothing
_AHEAD = 2  # steps that ranks may take while one of them chooses
_DEATH_S = 1.0
_END = b"\0"  # no signal has this number


class Preemption:
    """While the block runs, SIGTERM or SIGUSR1 asks this process to stop between two batches."""

    def __init__(self, run_dir: RunDir | None, rank: int = 0, size: int = 1):
        """Several ranks need a board: without a run directory, see `agreeing`."""
        self._board: StopBoard | None = None if run_dir is None else LauncherBoard(run_dir.path)
        self._rank = rank
        self._size = size
        self.is_asked = False
        self._ours: list[signal.Signals] = []
        self._is_starting = False
        self._wakeup = self._previous = -1
        self._listener: threading.Thread | None = None

    def __enter__(self) -> Preemption:
        if threading.current_thread() is threading.main_thread():
            self._ours = [n for n in SIGNALS if signal.getsignal(n) == signal.SIG_DFL]
            for number in self._ours:
                signal.signal(number, self._handle)
            if self._ours:
                self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            _set_wakeup(self._previous, self._wakeup)
            with suppress(BlockingIOError):  # it is full, of signals that the listener reads
                os.write(self._wakeup, _END)  # data loaders may have the pipe open, too
            os.close(self._wakeup)
            self._listener.join()
            for number in filter(self._is_ours, self._ours):
                signal.signal(number, signal.SIG_DFL)

    @contextmanager
    def agreeing(self, board: StopBoard) -> Iterator[None]:
        """While the block runs, ranks that no launcher of Shoal started agree on this board."""
        self._board = board
        try:
            yield
        finally:
            self._board = None

    def _listen(self) -> None:
        """A thread learns of the signal also while the main thread is in native code."""
        listen, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._previous = _set_wakeup(self._wakeup)  # of an event loop
        self._listener = threading.Thread(
            target=self._hear, args=(listen,), name="shoal-preemption", daemon=True
        )
        self._listener.start()

    def _hear(self, listen: int) -> None:
        while numbers := os.read(listen, 64):
            if any(number in numbers and self._is_ours(number) for number in self._ours):
                self._decide()
            if _END in numbers:
                break
        os.close(listen)

    def _is_ours(self, number: signal.Signals) -> bool:
        """Whether the script has not set a handler of its own meanwhile."""
        return signal.getsignal(number) == self._handle

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        """The listener decides."""

    def stops_after(self, steps: int, is_first: bool, period: int) -> bool:
        """Whether this rank, which has done `steps`, is to stop.

        `is_first`: this rank chooses. `period`: ranks meet after every so many steps (1: in every
        step; 0: never).
        """
        board = self._board
        if board is None:
            return self.is_asked
        last_step = board.last_step()
        if last_step is None and self.is_asked:
            board.note_step(self._rank, steps)
            chosen = self._choose(board, steps, period) if is_first else None
            if chosen is not None:
                board.write_last_step(chosen)
        return last_step is not None and steps >= last_step

    def _choose(self, board: StopBoard, steps: int, period: int) -> int | None:
        if not board.all_heard():
            return None
        if period == 1:
            return steps + 1
        noted = board.noted_steps()
        missing = set(range(self._size)) - noted.keys()
        if any(not board.has_exited(rank) for rank in missing):
            return None
        ahead = max(noted.values()) + _AHEAD
        return ahead if period == 0 else -(-ahead // period) * period

    def ask(self) -> None:
        """Another rank got a signal."""
        self.is_asked = True

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While the block runs there is nothing to save: a signal ends the process at once."""
        self._is_starting = True
        if self.is_asked:
            self._end_unsaved()
        try:
            yield
        finally:
            self._is_starting = False

    def _decide(self) -> None:
        """Ranks that have no board yet have not trained: there is nothing to save."""
        board = self._board
        if not (self._size == 1 if board is None else board.announce()):
            die()
        self.is_asked = True
        if self._is_starting:
            self._end_unsaved()

    def _end_unsaved(self) -> None:
        if self._rank == 0:
            say("preempted before the first step: there is nothing to save")
        die()


def _set_wakeup(descriptor: int, instead_of: int | None = None) -> int:
    """Where signals are written; returns the one before. Another's pipe is left as it is."""
    before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if instead_of not in (None, before):
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
    return before


def die() -> None:
    """As without a handler; from any thread."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_DEATH_S)


@contextmanager
def ending_by_exception() -> Iterator[None]:
    """While the block runs, SIGTERM and SIGHUP raise SystemExit. Main thread only."""

    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for ours in taken:
            signal.signal(ours, signal.SIG_IGN)  # a second one does not interrupt the removal
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    asked = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
    taken = [number for number in asked if signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    except SystemExit:
        if received:  # native code that was interrupted may have given it another status
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
