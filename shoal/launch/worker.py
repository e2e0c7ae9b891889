"""What a worker process does for the launcher that started it.

It dies when the launcher dies, leaves a report when it fails, and tells its progress.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

_PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """From now on this process is killed when its launcher ends, even by SIGKILL (Linux).

    Does nothing without a launcher of ours, on other systems, and behind a wrapper (a shell
    that runs python): there the kernel would watch the wrapper, not the launcher.
    """
    launcher = os.environ.get("SHOAL_LAUNCHER_PID")
    if sys.platform != "linux" or launcher is None or os.getsid(0) != os.getpid():
        return  # the launcher makes each worker the leader of its own session
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(launcher):
        os._exit(1)  # it died before we asked; nobody is left to tell


def open_progress(environ: Mapping[str, str]) -> Callable[[Mapping[str, Any]], None] | None:
    """A function that sends one record to the launcher, or None when nobody listens.

    It never waits: a record that finds the pipe full is dropped, so progress costs no training.
    """
    name = environ.get("SHOAL_PROGRESS_FD")
    if name is None:
        return None
    pipe = int(name)
    os.set_inheritable(pipe, False)
    os.set_blocking(pipe, False)
    torn = False

    def send(record: Mapping[str, Any]) -> None:
        nonlocal torn
        line = b"\n" * torn + json.dumps(record).encode() + b"\n"
        with suppress(BlockingIOError, BrokenPipeError):
            torn = os.write(pipe, line) < len(line)

    return send
