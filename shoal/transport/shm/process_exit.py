"""How a process that is no child of this one has ended.

A process that has ended and has not been waited for by its parent tells it in /proc; after that,
the kernel keeps it for those who hold a pidfd (Linux 6.15).
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from contextlib import suppress
from pathlib import Path

_INFO = struct.Struct("=QQ11Ii")  # of linux/pidfd.h: mask, …, exit code; its first version
_INFO_EXIT = 1 << 3
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_STAT_EXIT_CODE = 49  # its place after the name of the program: field 52 of /proc/PID/stat
_PAUSE_S = 0.005
PATIENCE_S = 1.0


def exit_status(pidfd: int, patience_s: float = PATIENCE_S) -> int | None:
    """As of Popen.returncode: 3, or -9 for SIGKILL; None if it still runs or nobody can say."""
    deadline_s = time.monotonic() + patience_s
    if pidfd < 0 or not select.select([pidfd], [], [], patience_s)[0]:
        return None
    while (status := _of_zombie(pidfd) or _of_reaped(pidfd)) is None:
        if time.monotonic() > deadline_s:
            return None
        time.sleep(_PAUSE_S)  # between being waited for and being told
    return os.waitstatus_to_exitcode(status[0])


def has_ended(pidfd: int) -> bool:
    return pidfd >= 0 and bool(select.select([pidfd], [], [], 0)[0])


def told(status: int | None) -> str:
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
        signal.pidfd_send_signal(pidfd, 0)  # it is still there, so that was its own entry
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
