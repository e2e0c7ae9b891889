"""The exit status of a process that is no child of this one, by its pidfd.

A process that has ended and has not been waited for by its parent shows its status in /proc. After
that the kernel keeps the status for holders of a pidfd (Linux 6.15).
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shoal.comm.transport.shm.memfd import pidfd_open, pidfd_send_signal

_INFO = struct.Struct("=QQ11Ii")  # of linux/pidfd.h: mask, …, exit code; its first version
_INFO_EXIT = 1 << 3
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_STAT_EXIT_CODE = 49  # index after the name of the program: field 52 of /proc/PID/stat
_PAUSE_S = 0.005
PATIENCE_S = 1.0


def open_pidfds(pids: Sequence[int]) -> list[int]:
    """A pidfd of each process, which the caller closes; OSError if one of them has ended."""
    pidfds: list[int] = []
    try:
        for pid in pids:
            pidfds.append(pidfd_open(pid))
    except OSError:
        close_pidfds(pidfds)
        raise
    return pidfds


def close_pidfds(pidfds: Sequence[int]) -> None:
    for pidfd in pidfds:
        os.close(pidfd)


def exit_status(pidfd: int, patience_s: float = PATIENCE_S) -> int | None:
    """As Popen.returncode: 3, or -9 for SIGKILL; None if it still runs or the kernel cannot say."""
    deadline_s = time.monotonic() + patience_s
    if not has_ended(pidfd, patience_s):
        return None
    while (status := _of_zombie(pidfd) or _of_reaped(pidfd)) is None:
        if time.monotonic() > deadline_s:
            return None
        time.sleep(_PAUSE_S)  # between the parent's wait and the kernel's record
    return os.waitstatus_to_exitcode(status[0])


def has_ended(pidfd: int, patience_s: float = 0.0) -> bool:
    """Whether the process ends within `patience_s`; False for a pidfd of -1."""
    if pidfd < 0:
        return False
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(patience_s * 1000))


def describe_status(status: int | None) -> str:
    if status is None:
        return "exit status unknown"
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:  # a real-time signal
        return f"killed by signal {-status}"


def _of_zombie(pidfd: int) -> tuple[int] | None:
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{_pid(pidfd)}/stat").read_text().rpartition(")")[2].split()
        pidfd_send_signal(pidfd, 0)  # not reaped yet, so the entry read was its own
        return (int(fields[_STAT_EXIT_CODE]),) if fields[0] in "ZX" else None
    return None


def _of_reaped(pidfd: int) -> tuple[int] | None:
    info = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
    with suppress(OSError):
        fcntl.ioctl(pidfd, _GET_INFO, info)
        mask, *_, code = _INFO.unpack(info)
        return (code,) if mask & _INFO_EXIT else None
    return None


def _pid(pidfd: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))
