"""Threads of the launcher that look at a run while it goes on.

kept_memory         memory that workers share stays open where lost ones may come back
StoppedProcesses    processes that are stopped (SIGSTOP) are named, and killed after --timeout
start_notice        one line where the start takes long and nothing is printed meanwhile
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

from shoal.runtime.config import WaitConfig
from shoal.runtime.run_dir import RunDir
from shoal.runtime.waits import state_of
from shoal.transport.shm.lasting_memory import keep

_MEMORY_S = 0.02
_LONGEST_PAUSE_S = 1.0
_SILENT_S = 3.0


@contextmanager
def looking(name: str, every_s: float, look: Callable[[], None]) -> Iterator[None]:
    """While the block runs a thread calls `look` again and again."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(every_s):
            with suppress(OSError):  # of a full disk, for example: it looks again
                look()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def kept_memory(run_dir: RunDir, is_needed: bool = True) -> Iterator[None]:
    """So it lasts when those that have opened it are lost before the others have come."""
    kept: list[int] = []

    def look() -> None:
        for folder in run_dir.memory_folders():
            descriptor = keep(folder)
            if descriptor is not None:
                kept.append(descriptor)

    if not is_needed:
        yield
        return
    try:
        with looking("shoal-memory", _MEMORY_S, look):
            yield
    finally:
        for descriptor in kept:
            os.close(descriptor)


class StoppedProcesses:
    """A stopped process neither exits nor answers, so its peers wait for it (Linux).

    It is killed at the limit, which every strategy knows how to treat: a loss that it survives, or
    the end of the run.
    """

    def __init__(
        self,
        config: WaitConfig,
        processes: Callable[[], Sequence[tuple[str, int]]],
        say: Callable[[str], None],
    ):
        """`processes` gives names and process ids; ids must not have been reaped."""
        self._config = config
        self._processes = processes
        self._say = say
        self._since_s: dict[int, float] = {}
        self._said_s: dict[int, float] = {}

    def watched(self) -> AbstractContextManager[None]:
        config = self._config
        shortest_s = min(config.notice_s, config.repeat_s, config.limit_s or config.notice_s)
        return looking("shoal-stopped", min(_LONGEST_PAUSE_S, shortest_s / 4), self._look)

    def _look(self) -> None:
        for name, pid in self._processes():
            if state_of(pid) == "T":
                self._note(name, pid)
            else:
                self._since_s.pop(pid, None)
                self._said_s.pop(pid, None)

    def _note(self, name: str, pid: int) -> None:
        now_s = time.monotonic()
        stopped_s = now_s - self._since_s.setdefault(pid, now_s)
        next_s = self._said_s.get(pid, self._since_s[pid] + self._config.notice_s)
        limit_s = self._config.limit_s
        if limit_s is not None and stopped_s >= limit_s:
            self._say(f"{name} has been stopped for {stopped_s:.0f} s and is killed: --timeout")
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        elif now_s >= next_s:
            self._said_s[pid] = now_s + self._config.repeat_s
            self._say(f"{name} (process {pid}) has been stopped for {stopped_s:.0f} s: SIGCONT")


@contextmanager
def start_notice(
    line: str,
    say: Callable[[str], None],
    is_heard: threading.Event,
    has_started: Callable[[], bool],
    silent_s: float = _SILENT_S,
) -> Iterator[None]:
    """Around a run: `line` is said once it has been silent for a while and has not started."""

    def wait() -> None:
        if not is_heard.wait(silent_s) and not has_started():
            say(line)

    thread = threading.Thread(target=wait, name="shoal-start-notice", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_heard.set()
        thread.join()
