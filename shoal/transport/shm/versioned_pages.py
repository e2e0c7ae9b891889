"""Pages of shared memory: each rank writes its own, and all read them when they like.

    page    [ made by | begun | latest | closed | … ]  [ slot 0 ]  [ slot 1 ]

Nobody waits for anybody. Version v is written into slot v % 2 and then named the latest, so a
reader of v is disturbed only by the writing of v + 2; it looks at `begun` afterwards and tries
again. A rank that has died or closed its page leaves its last version behind. The memory has no
name: the others open it through the process that made it, so it goes when the last one goes.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import threading
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from shoal.transport.shm.memfd import make, map_all, open_from
from shoal.transport.shm.segment import Exchange

Bytes = NDArray[np.uint8]
_HEAD_BYTES = 4096
_MADE_BY, _BEGUN, _LATEST, _CLOSED = range(4)
_ATTEMPTS = 4


class Page:
    """A rank's page as this process sees it."""

    def __init__(self, memory: mmap.mmap, num_bytes: int):
        self._memory = memory
        self.head: NDArray[np.int64] = np.frombuffer(memory, np.int64, 8)
        self._slots = [_slot(memory, num_bytes, index) for index in (0, 1)]
        self._lock = threading.Lock()

    def write(self, data: Bytes) -> int:
        version = int(self.head[_LATEST]) + 1
        self.head[_BEGUN] = version
        self._fence()
        self._slots[version % 2][:] = data
        self._fence()
        self.head[_LATEST] = version
        return version

    def read(self, into: Bytes, newer_than: int) -> int | None:
        """The version that is in `into` now; None if there is no newer one, or too much stir."""
        for _ in range(_ATTEMPTS):
            version = int(self.head[_LATEST])
            if version <= newer_than:
                return None
            self._fence()
            into[:] = self._slots[version % 2]
            self._fence()
            if int(self.head[_BEGUN]) < version + 2:
                return version
        return None

    def _fence(self) -> None:
        """Other processes see what stands before it before what follows; ARM would mix it up.

        Letting go of a lock and taking it again is the one full barrier that Python has.
        """
        with self._lock:
            pass
        with self._lock:
            pass

    def release(self) -> None:
        del self.head, self._slots  # the memory cannot be unmapped while something shows it
        self._memory.close()


class Board:
    """The pages of all ranks of one host. `meet` makes it."""

    def __init__(self, pages: list[Page], processes: list[int], rank: int):
        self.rank = rank
        self.size = len(pages)
        self._pages = pages
        self._processes = processes
        self._dead: set[int] = set()

    @classmethod
    def meet(cls, exchange: Exchange, rank: int, size: int, num_bytes: int) -> Board | None:
        """All ranks call it with the same size; None on all of them if they share no memory."""
        fd = make("shoal-board", _size(num_bytes))
        generation = secrets.randbits(62)
        pages: list[Page] = []
        processes: list[int] = []
        try:
            if fd >= 0:
                own = Page(map_all(fd, _size(num_bytes)), num_bytes)
                own.head[_MADE_BY] = generation
                own.release()
            said = exchange(f"{os.getpid()} {fd} {generation}".encode())
            with suppress(OSError, ValueError):
                for offer in said:
                    pid, other, made_by = map(int, offer.split())
                    pages.append(_open(pid, other, num_bytes, made_by))
                    processes.append(os.pidfd_open(pid))
            answers = exchange(b"yes" if len(processes) == size else b"no")
        finally:
            if fd >= 0:
                os.close(fd)
        board = cls(pages, processes, rank)
        if b"no" in answers:
            board.release()
            return None
        return board

    def write(self, data: Bytes) -> int:
        """Make `data` this rank's latest version, and return its number, from 1 on."""
        return self._pages[self.rank].write(data)

    def read(self, peer: int, into: Bytes, newer_than: int = 0) -> int | None:
        return self._pages[peer].read(into, newer_than)

    def version(self, peer: int) -> int:
        return int(self._pages[peer].head[_LATEST])

    def has_closed(self, peer: int) -> bool:
        """It has done all that it wanted; its last version stays."""
        return bool(self._pages[peer].head[_CLOSED])

    def has_died(self, peer: int) -> bool:
        """Its process has ended before it closed its page."""
        if peer not in self._dead and not self.has_closed(peer):
            poll = select.poll()
            poll.register(self._processes[peer], select.POLLIN)
            if poll.poll(0) and not self.has_closed(peer):
                self._dead.add(peer)
        return peer in self._dead

    def close(self) -> None:
        """This rank writes no more. The others may read on."""
        if self._pages:
            self._pages[self.rank].head[_CLOSED] = 1
        self.release()

    def release(self) -> None:
        for page in self._pages:
            page.release()
        for process in self._processes:
            os.close(process)
        self._pages = []
        self._processes = []


def _slot(memory: mmap.mmap, num_bytes: int, index: int) -> Bytes:
    return np.frombuffer(memory, np.uint8, num_bytes, _HEAD_BYTES + index * _padded(num_bytes))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


def _size(num_bytes: int) -> int:
    return _HEAD_BYTES + 2 * _padded(num_bytes)


def _open(pid: int, fd: int, num_bytes: int, generation: int) -> Page:
    own = open_from(pid, fd, _size(num_bytes))
    try:
        page = Page(map_all(own, _size(num_bytes)), num_bytes)
    finally:
        os.close(own)
    if int(page.head[_MADE_BY]) != generation:
        page.release()
        raise ValueError("the page is another's")
    return page
