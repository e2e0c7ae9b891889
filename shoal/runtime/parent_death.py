"""A process that ends when its parent does, even when the parent is killed; a fork that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

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


@contextmanager
def forks_end_here() -> Iterator[None]:
    """A process that is forked inside ends where it would leave: what comes then is its parent's.

    It has none of the threads that the end of a worker waits for.
    """
    parent = os.getpid()
    status = 0
    try:
        yield
    except BaseException as error:
        if os.getpid() != parent:
            status = _exit_status(error)
        raise
    finally:
        if os.getpid() != parent:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def _exit_status(error: BaseException) -> int:
    """As of an interpreter that ends with this, which it prints likewise."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    return 1
