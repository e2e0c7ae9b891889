"""Anonymous shared memory (memfd), and the rendezvous by which ranks of one host share it.

    make        offer (pid, fd, generation)      exchange ──▶ the offers of all ranks
    open        /proc/PID/fd/FD                  size, seals and generation are checked
    agree       yes or no                        exchange ──▶ all ranks attach, or none does

The memory has no name in a file system, so the kernel frees it with the last process that maps it.
Only processes of the same user can open it. Its size is sealed: no process can truncate it under
another.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import secrets
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from shoal.runtime.memory_limit import memory_left

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
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    result: int = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


T = TypeVar("T")
# An all-gather of a few bytes: the bytes of every rank, by rank. All ranks call it.
Exchange = Callable[[bytes], list[bytes]]

_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_SEALS = 0x1 | 0x2 | 0x4  # seal, shrink, grow
_GENERATION_BYTES = 8
_PART_BYTES = 1 << 20


def make(label: str, num_bytes: int, generation: int = 0) -> int:
    """A descriptor, which the caller closes; -1 where memfd is unavailable or memory is full.

    The first 8 bytes hold `generation`; the rest is zero.
    """
    if not fits(label, num_bytes):
        return -1
    try:
        fd = memfd_create(label)
    except OSError:
        return -1
    try:
        _allocate(fd, num_bytes)  # fails now instead of with SIGBUS later
        if generation:
            os.pwrite(fd, generation.to_bytes(_GENERATION_BYTES, sys.byteorder), 0)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        return -1
    return fd


def fits(use: str, num_bytes: int) -> bool:
    """Whether there is room for so much; says so if not, since the kernel would kill a process."""
    left = memory_left()
    refusal = left.refusal(num_bytes, use) if left is not None else None
    if refusal is not None:
        print(f"shoal: {refusal}", file=sys.stderr)
    return refusal is None


def _allocate(fd: int, num_bytes: int) -> None:
    """In parts: a signal undoes the call that it interrupts, and the call is made again."""
    for start in range(0, num_bytes, _PART_BYTES):
        os.posix_fallocate(fd, start, min(_PART_BYTES, num_bytes - start))


def new_generation() -> int:
    """A number that tells this memory from any other: 1 to 2**62."""
    return secrets.randbits(62) + 1


def is_sealed(fd: int, num_bytes: int) -> bool:
    """Whether this is sealed memory of exactly `num_bytes`."""
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError:
        return False
    return seals & _SEALS == _SEALS and os.fstat(fd).st_size == num_bytes


def map_all(fd: int, num_bytes: int) -> mmap.mmap:
    """Map the memory for reading and writing; the descriptor may be closed afterwards."""
    return mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


@dataclass(frozen=True)
class Offer:
    """Memory that another process holds; `fd` is -1 if that process has none to offer."""

    pid: int
    fd: int
    generation: int = 0

    @classmethod
    def parse(cls, text: bytes) -> Offer:
        pid, fd, generation = map(int, text.split())
        return cls(pid, fd, generation)

    def __bytes__(self) -> bytes:
        return f"{self.pid} {self.fd} {self.generation}".encode()

    def open(self) -> int:
        """A descriptor, which the caller closes. OSError on another host or as another user."""
        return os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)

    def open_checked(self, num_bytes: int | None) -> int:
        """As `open`; ValueError unless it is sealed memory of this size and generation.

        None: of any size.
        """
        fd = self.open()
        size = os.fstat(fd).st_size if num_bytes is None else num_bytes
        if is_sealed(fd, size) and self._is_generation_of(fd):
            return fd
        os.close(fd)
        raise ValueError(f"process {self.pid} offers other memory than {size} sealed bytes")

    def map(self, num_bytes: int) -> mmap.mmap:
        fd = self.open_checked(num_bytes)
        try:
            return map_all(fd, num_bytes)
        finally:
            os.close(fd)

    def _is_generation_of(self, fd: int) -> bool:
        stamp = os.pread(fd, _GENERATION_BYTES, 0)
        return not self.generation or int.from_bytes(stamp, sys.byteorder) == self.generation


def share(exchange: Exchange, rank: int, num_bytes: int | None, generation: int = 0) -> int | None:
    """A descriptor, which the caller closes, of memory that rank 0 makes and all others open.

    None on all ranks if one of them cannot open it, or gives `num_bytes=None`. A collective call.
    """

    def attach(offers: list[Offer]) -> int:
        if num_bytes is None:
            raise ValueError("this rank does not share its weights")
        return offers[0].open_checked(num_bytes)

    makes = rank == 0 and num_bytes is not None
    fd = make("shoal-weights", num_bytes or 0, generation) if makes else -1
    return rendezvous(exchange, fd, attach, os.close, generation)


def rendezvous(
    exchange: Exchange,
    fd: int,
    attach: Callable[[list[Offer]], T],
    discard: Callable[[T], object],
    generation: int = 0,
) -> T | None:
    """What `attach` returns for the offers of all ranks; None on all ranks if one rank fails.

    All ranks call it: two exchanges. `fd` (-1 for none) is this rank's offer and is closed here.
    `attach` raises OSError or ValueError where it cannot; `discard` undoes it where others cannot.
    """
    attached = None
    try:
        offers = exchange(bytes(Offer(os.getpid(), fd, generation)))
        with suppress(OSError, ValueError):
            attached = attach([Offer.parse(offer) for offer in offers])
        answers = exchange(b"no" if attached is None else b"yes")
    except BaseException:
        if attached is not None:
            discard(attached)
        raise
    finally:
        if fd >= 0:
            os.close(fd)
    if attached is not None and any(answer != b"yes" for answer in answers):
        discard(attached)
        return None
    return attached
