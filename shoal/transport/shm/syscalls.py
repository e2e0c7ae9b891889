"""System calls of Linux that some builds of Python do not have: those of uv, conda and musl.

They were compiled with older headers; the kernel that they run on has the calls all the same.
OSError (ENOSYS) where it has not.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import sys

_MFD_CLOEXEC = 1
_MFD_ALLOW_SEALING = 2
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "riscv64": 279, "ppc64le": 360, "s390x": 350}
_PIDFD_SEND_SIGNAL = 424  # from here on numbers are the same on all machines
_PIDFD_OPEN = 434


def memfd_create(label: str) -> int:
    """A descriptor of anonymous memory that can be sealed; the caller closes it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(label, _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    number = _MEMFD_CREATE.get(platform.machine())
    return _call(number, ctypes.c_char_p(label.encode()), _MFD_CLOEXEC | _MFD_ALLOW_SEALING)


def pidfd_open(pid: int) -> int:
    """A descriptor of a process; the caller closes it."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call(_PIDFD_OPEN, pid, 0)


def pidfd_send_signal(pidfd: int, number: int) -> None:
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, number)
    else:
        _call(_PIDFD_SEND_SIGNAL, pidfd, number, None, 0)


def _call(number: int | None, *args: object) -> int:
    if number is None or sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    result: int = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
