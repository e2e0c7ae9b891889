"""Memory without a name: whoever has a descriptor can map it, and it goes with the last of them.

Its size is sealed, so that nobody can cut it off under another's hands. Linux only.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys

_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_SEALS = 0x1 | 0x2 | 0x4  # seal, shrink, grow


def make(label: str, num_bytes: int) -> int:
    """A descriptor, which the caller closes; -1 where there is no such memory."""
    if sys.platform != "linux":
        return -1
    try:
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return -1
    try:
        os.posix_fallocate(fd, 0, num_bytes)  # a full memory is told now, not by a signal
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        return -1
    return fd


def open_from(pid: int, fd: int, num_bytes: int) -> int:
    """A descriptor of what another process has made; OSError or ValueError if it is not that."""
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(own).st_size != num_bytes:
        os.close(own)
        raise ValueError("the memory has another size")
    return own


def is_sealed(fd: int, num_bytes: int) -> bool:
    """Whether it is such memory, of exactly this size."""
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError:
        return False
    return seals & _SEALS == _SEALS and os.fstat(fd).st_size == num_bytes


def map_all(fd: int, num_bytes: int) -> mmap.mmap:
    return mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
