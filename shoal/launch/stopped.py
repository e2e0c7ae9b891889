"""Processes of a run that are stopped (SIGSTOP): the launcher says so, and with a limit ends them.

A stopped process neither exits nor answers, so its peers wait for it. After `--timeout` it is
killed, which every strategy knows how to treat: a loss that it survives, or the end of the run.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from shoal.runtime.config import WaitConfig
from shoal.runtime.waits import state_of

_LONGEST_PAUSE_S = 1.0


class StoppedProcesses:
    """A thread that looks at the processes of a run while the block runs (Linux)."""

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
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-stopped", daemon=True)

    def __enter__(self) -> StoppedProcesses:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        config = self._config
        shortest_s = min(config.notice_s, config.repeat_s, config.limit_s or config.notice_s)
        while not self._over.wait(min(_LONGEST_PAUSE_S, shortest_s / 4)):
            for name, pid in self._processes():
                self._look(name, pid)

    def _look(self, name: str, pid: int) -> None:
        if state_of(pid) != "T":
            self._since_s.pop(pid, None)
            self._said_s.pop(pid, None)
            return
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
