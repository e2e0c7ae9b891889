"""A process that ends when its parent does, even when the parent is killed."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Mapping

_PR_SET_PDEATHSIG = 1


def in_child(parent_pid: int) -> Callable[[], None]:
    """For `Popen(preexec_fn=…)`: the new process is killed with its parent from its first moment.

    A worker spends seconds on imports before it could ask for that itself.
    """
    prctl = ctypes.CDLL(None).prctl  # looked up here: the child of a fork should do little

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(1)

    return ask


def die_with_launcher(launcher_pid: int | None, environ: Mapping[str, str] | None = None) -> None:
    """From now on this process is killed when its launcher ends, or torchrun, even by SIGKILL.

    Does nothing without a launcher of Shoal, and behind a wrapper (a shell that runs python):
    there the kernel would watch the wrapper, not the launcher.
    """
    if "TORCHELASTIC_RUN_ID" in (environ or {}):
        die_with(os.getppid())
    if launcher_pid is None or os.getsid(0) != os.getpid():
        return  # the launcher makes each worker the leader of its own session
    die_with(launcher_pid)


def die_with_parent(parent_pid: int | None) -> None:
    """From now on this process gets SIGTERM when its parent ends."""
    if parent_pid is not None:
        die_with(parent_pid, signal.SIGTERM)


def die_with(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """From now on this process gets the signal when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent ended before this process asked for the signal
