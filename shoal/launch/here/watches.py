"""Threads of the launcher that look at a run while it goes on.

kept_memory         memory that workers share stays open where lost ones may come back
noticing_stopped    processes that are stopped (SIGSTOP) are named, and killed after --timeout
start_notice        one line where the start takes long and nothing is printed meanwhile
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress

from shoal.comm.transport.shm.lasting_memory import keep
from shoal.runtime.config import WaitConfig
from shoal.runtime.run_dir import RunDir
from shoal.runtime.waits import Periodic, state_of

_MEMORY_S = 0.02
SILENT_S = 3.0


@contextmanager
def kept_memory(run_dir: RunDir, is_needed: bool = True) -> Iterator[None]:
    """So it lasts when those that have opened it are lost before the others have come."""

    def look() -> None:
        for folder in run_dir.memory_folders():
            if (descriptor := keep(folder)) is not None:
                kept.callback(os.close, descriptor)

    looks = Periodic("shoal-memory", _MEMORY_S, look) if is_needed else nullcontext()
    with ExitStack() as kept, looks:
        yield


def noticing_stopped(
    config: WaitConfig,
    processes: Callable[[], Sequence[tuple[str, int]]],
    say: Callable[[str], None],
) -> Periodic:
    """A stopped process neither exits nor answers, so its peers wait for it (Linux).

    It is killed at the limit: a loss that the strategy survives, or the end of the run. `processes`
    gives names and process ids, which must not have been reaped.
    """
    since_s: dict[int, float] = {}
    next_s: dict[int, float] = {}

    def look() -> None:
        now_s = time.monotonic()
        for name, pid in processes():
            if state_of(pid) != "T":
                since_s.pop(pid, None)
                next_s.pop(pid, None)
                continue
            stopped_s = now_s - since_s.setdefault(pid, now_s)
            if config.limit_s is not None and stopped_s >= config.limit_s:
                say(f"{name} has been stopped for {stopped_s:.0f} s and is killed: --timeout")
                with suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
            elif now_s >= next_s.setdefault(pid, now_s + config.notice_s):
                next_s[pid] = now_s + config.repeat_s
                say(f"{name} (process {pid}) has been stopped for {stopped_s:.0f} s: SIGCONT")

    return Periodic("shoal-stopped", config.pause_s, look)


def start_notice(
    line: str,
    say: Callable[[str], None],
    is_heard: threading.Event,
    has_started: Callable[[], bool],
    silent_s: float,
) -> Periodic:
    """Around a run: `line` is said once it has been silent for a while and has not started."""
    unsaid = [line]

    def look() -> None:
        if unsaid and not is_heard.is_set() and not has_started():
            say(line)
        unsaid.clear()

    return Periodic("shoal-start-notice", silent_s, look)
