"""Pages of shared memory, one writer each: every rank reads them at any time, without waiting.

    page    [ generation | begun | latest | closed | life | steps | … ]  [ slot 0 ]  [ slot 1 ]

A seqlock with two slots. Version v is written into slot v % 2 and then becomes the latest, so only
the writing of v + 2 disturbs a reader of v. The reader checks `begun` afterwards and tries again.
A rank that has died or closed its page leaves its last version there.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shoal.transport.shm import memfd
from shoal.transport.shm.lasting_memory import LastingMemory
from shoal.transport.shm.memfd import Exchange, Offer
from shoal.transport.shm.process_exit import close_pidfds, has_ended, open_pidfds

Bytes = NDArray[np.uint8]
_HEADER_BYTES = 4096
_GENERATION, _BEGUN, _LATEST, _CLOSED, _LIFE, _STEPS = range(6)
_ATTEMPTS = 4


class VersionedPage:
    """The page of one rank as this process sees it."""

    def __init__(self, memory: mmap.mmap, num_bytes: int, start: int = 0):
        """The page begins at `start` in the memory, which is the page's own where that is 0."""
        self._memory = memory
        self.header: NDArray[np.int64] = np.frombuffer(memory, np.int64, 8, start)
        self._slots = [_slot(memory, num_bytes, index, start) for index in (0, 1)]
        self._lock = threading.Lock()

    def write(self, data: Bytes, at_least: int = 0) -> int:
        version = max(int(self.header[_LATEST]) + 1, at_least)
        self.header[_BEGUN] = version
        self._fence()
        self._slots[version % 2][:] = data
        self._fence()
        self.header[_LATEST] = version
        return version

    def come_back(self, life: int) -> None:
        """Another process writes this page from now on."""
        self.header[_BEGUN] = self.header[_LATEST]
        self.header[_CLOSED] = 0
        self.header[_LIFE] = life

    def read(self, into: Bytes, newer_than: int) -> int | None:
        """The version that is in `into` now; None if none is newer or the writer was too fast."""
        for _ in range(_ATTEMPTS):
            version = int(self.header[_LATEST])
            if version <= newer_than:
                return None
            self._fence()
            into[:] = self._slots[version % 2]
            self._fence()
            if int(self.header[_BEGUN]) < version + 2:
                return version
        return None

    def _fence(self) -> None:
        """A full memory barrier: ARM may reorder stores and loads across processes.

        Releasing a lock and acquiring it again is the one full barrier that Python has.
        """
        with self._lock:
            pass
        with self._lock:
            pass

    def release(self) -> None:
        del self.header, self._slots  # memory cannot be unmapped while an array shows it
        self._memory.close()


class VersionedPages:
    """The pages of all ranks of one host. Made by `join`."""

    def __init__(self, pages: list[VersionedPage], pidfds: list[int], rank: int):
        self.rank = rank
        self.size = len(pages)
        self._pages = pages
        self._pidfds = pidfds
        self._dead: set[int] = set()

    @classmethod
    def join(cls, exchange: Exchange, rank: int, num_bytes: int) -> VersionedPages | None:
        """All ranks call it with the same `num_bytes`; None on all of them if one cannot join."""
        generation = memfd.new_generation()
        fd = memfd.make("shoal-page", page_bytes(num_bytes), generation)

        def attach(offers: list[Offer]) -> VersionedPages:
            pidfds = open_pidfds([offer.pid for offer in offers])
            try:
                return cls(_map_pages(offers, num_bytes), pidfds, rank)
            except (OSError, ValueError):
                close_pidfds(pidfds)
                raise

        return memfd.rendezvous(exchange, fd, attach, cls.release, generation)

    def write(self, data: Bytes, at_least: int = 0) -> int:
        """Make `data` this rank's latest version, and return its number, from 1 on."""
        return self._pages[self.rank].write(data, at_least)

    def read(self, peer: int, into: Bytes, newer_than: int = 0) -> int | None:
        return self._pages[peer].read(into, newer_than)

    def version(self, peer: int) -> int:
        return int(self._pages[peer].header[_LATEST])

    def latest(self) -> int:
        """The latest version of all ranks."""
        return max(self.version(peer) for peer in range(self.size))

    def note_steps(self, steps: int) -> None:
        self._pages[self.rank].header[_STEPS] = steps

    def steps(self, peer: int) -> int:
        """How many steps it has begun, as it noted."""
        return int(self._pages[peer].header[_STEPS])

    def life(self, peer: int) -> int:
        """How often its process was started again."""
        return int(self._pages[peer].header[_LIFE])

    def has_closed(self, peer: int) -> bool:
        """It writes no more; its last version stays readable."""
        return bool(self._pages[peer].header[_CLOSED])

    def has_died(self, peer: int) -> bool:
        """Its process has ended before it closed its page."""
        if peer not in self._dead and not self.has_closed(peer):
            has_ended_now = has_ended(self._pidfds[peer])
            if has_ended_now and not self.has_closed(peer):  # it may have closed in between
                self._dead.add(peer)
        return peer in self._dead

    def close(self) -> None:
        """This rank writes no more. The others may go on reading its page."""
        if self._pages:
            self._pages[self.rank].header[_CLOSED] = 1
        self.release()

    def release(self) -> None:
        for page in self._pages:
            page.release()
        close_pidfds(self._pidfds)
        self._pages = []
        self._pidfds = []


class LastingPages(VersionedPages):
    """Pages of ranks that may come back, or come late: all of them are in one memory.

    `has_ended(rank, life)` tells whether that process of a rank has ended.
    """

    def __init__(
        self,
        memory: LastingMemory,
        place: tuple[int, int, int],
        num_bytes: int,
        has_ended: Callable[[int, int], bool],
    ):
        """`place` is the rank, the number of ranks, and how often this one was started again."""
        rank, size, life = place
        starts = [index * _whole_pages(num_bytes) for index in range(size)]
        super().__init__([VersionedPage(memory.memory, num_bytes, at) for at in starts], [], rank)
        self._lasting = memory
        self._has_ended = has_ended
        self._pages[rank].come_back(life)

    @staticmethod
    def needed_bytes(size: int, num_bytes: int) -> int:
        return size * _whole_pages(num_bytes)

    def has_died(self, peer: int) -> bool:
        return not self.has_closed(peer) and self._has_ended(peer, self.life(peer))

    def release(self) -> None:
        for page in self._pages:
            del page.header, page._slots
        self._pages = []
        self._lasting.close()


def _whole_pages(num_bytes: int) -> int:
    return -(-page_bytes(num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE


def _slot(memory: mmap.mmap, num_bytes: int, index: int, start: int) -> Bytes:
    offset = start + _HEADER_BYTES + index * _padded(num_bytes)
    return np.frombuffer(memory, np.uint8, num_bytes, offset)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


def page_bytes(num_bytes: int) -> int:
    return _HEADER_BYTES + 2 * _padded(num_bytes)


def _map_pages(offers: list[Offer], num_bytes: int) -> list[VersionedPage]:
    pages: list[VersionedPage] = []
    try:
        for offer in offers:
            pages.append(VersionedPage(offer.map(page_bytes(num_bytes)), num_bytes))
    except (OSError, ValueError):
        for page in pages:
            page.release()
        raise
    return pages
