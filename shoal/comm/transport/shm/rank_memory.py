"""Memory that the ranks of a host read and write at any time, without locks.

    [ a line of marks for each rank ]  [ body ................................ ]
      generation (rank 0's line), closed, incarnation, steps of the job, those of its user

Rank 0 makes it and the others open it. Where ranks may come back, or come late, it is a
`LastingMemory`.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from shoal.comm.transport.shm import memfd
from shoal.comm.transport.shm.lasting_memory import LastingMemory
from shoal.comm.transport.shm.memfd import Exchange, Offer
from shoal.comm.transport.shm.process_exit import close_pidfds, has_ended, open_pidfds

_LINE = 8  # marks of a rank: one cache line of int64
_GENERATION, _CLOSED, _INCARNATION, _JOB_STEPS = range(4)
FREE_MARK = 4  # the first mark that is the user's


@dataclass(eq=False)
class RankMemory:
    """One process's view. Made by `join` or `lasting`."""

    memory: mmap.mmap
    rank: int
    size: int
    _has_ended: Callable[[int], bool]  # whether the process of a rank has
    _release: Callable[[], None] | None

    def __post_init__(self) -> None:
        self.offset = header_bytes(self.size)  # where the body begins in `memory`
        lines = np.frombuffer(self.memory, np.int64, _LINE * self.size)
        self.marks: NDArray[np.int64] = lines.reshape(self.size, _LINE)

    @classmethod
    def join(cls, exchange: Exchange, rank: int, size: int, num_bytes: int) -> RankMemory | None:
        """All ranks call it with the same size of body; None on all of them if one cannot join."""
        num_bytes += header_bytes(size)
        generation = memfd.new_generation()
        fd = memfd.make("shoal-ranks", num_bytes, generation) if rank == 0 else -1

        def attach(offers: list[Offer]) -> RankMemory:
            pidfds = open_pidfds([offer.pid for offer in offers])
            try:
                memory = offers[0].map(num_bytes)
            except (OSError, ValueError):
                close_pidfds(pidfds)
                raise
            release = partial(close_pidfds, pidfds)
            return cls(memory, rank, size, lambda peer: has_ended(pidfds[peer]), release)

        return memfd.rendezvous(exchange, fd, attach, cls.release, generation)

    @classmethod
    def lasting(
        cls,
        lasting: LastingMemory,
        place: tuple[int, int, int],
        has_ended: Callable[[int, int], bool],
    ) -> RankMemory:
        """`place` is the rank, the number of ranks, and the incarnation of this one.

        `has_ended(rank, incarnation)` tells whether that process of a rank has ended.
        """
        rank, size, incarnation = place

        def ended(peer: int) -> bool:
            return has_ended(peer, made.incarnation(peer))

        made = cls(lasting.memory, rank, size, ended, lasting.close)
        made.marks[rank, _INCARNATION] = incarnation
        made.marks[rank, _CLOSED] = 0
        return made

    def incarnation(self, peer: int) -> int:
        """How often its process was started again."""
        return int(self.marks[peer, _INCARNATION])

    @property
    def job_steps(self) -> NDArray[np.int64]:
        """The step that each rank has begun last; a rank writes its own entry only."""
        return self.marks[:, _JOB_STEPS]

    def has_closed(self, peer: int) -> bool:
        """It changes nothing any more."""
        return bool(self.marks[peer, _CLOSED])

    def has_finished(self, peer: int) -> bool:
        """It has closed, or its process has ended."""
        return self.has_closed(peer) or self._has_ended(peer)

    def has_died(self, peer: int) -> bool:
        """Its process has ended before it closed."""
        return self.has_finished(peer) and not self.has_closed(peer)

    def close(self) -> None:
        """This rank changes nothing any more. The memory stays mapped while tensors show it."""
        self.marks[self.rank, _CLOSED] = 1
        self.release()

    def release(self) -> None:
        if self._release is not None:
            self._release()
        self._release = None


def header_bytes(size: int) -> int:
    return size * _LINE * 8


Bytes = NDArray[np.uint8]
_BEGUN = FREE_MARK
_LATEST = FREE_MARK + 1
_ATTEMPTS = 4


class VersionedPages:
    """The pages of all ranks, of `num_bytes` each, in a memory of `page_bytes` for each rank.

        page of a rank    begun and latest (among its marks)    [ slot 0 ]  [ slot 1 ]

    Each has one writer; every rank reads them at any time, without waiting. A seqlock with two
    slots: version v is written into slot v % 2 and then becomes the latest, so only the writing of
    v + 2 disturbs a reader of v. The reader checks `begun` afterwards and tries again. A rank that
    has died or closed leaves its last version there.
    """

    def __init__(self, ranks: RankMemory, num_bytes: int):
        self._rank = ranks.rank
        self._marks = ranks.marks
        self._marks[ranks.rank, _BEGUN] = self._marks[ranks.rank, _LATEST]  # it may have come back
        size = page_bytes(num_bytes)
        body = np.frombuffer(ranks.memory, np.uint8, size * ranks.size, ranks.offset)
        pages = body.reshape(ranks.size, 2, size // 2)[..., :num_bytes]
        self._slots = [list(page) for page in pages]
        self._lock = threading.Lock()

    def write(self, data: Bytes, at_least: int = 0) -> int:
        """Make `data` this rank's latest version, and return its number, from 1 on."""
        version = max(self.version(self._rank) + 1, at_least)
        self._marks[self._rank, _BEGUN] = version
        self._fence()
        self._slots[self._rank][version % 2][:] = data
        self._fence()
        self._marks[self._rank, _LATEST] = version
        return version

    def read(self, peer: int, into: Bytes, newer_than: int = 0) -> int | None:
        """The version that is in `into` now; None if none is newer or the writer was too fast."""
        for _ in range(_ATTEMPTS):
            version = self.version(peer)
            if version <= newer_than:
                return None
            self._fence()
            into[:] = self._slots[peer][version % 2]
            self._fence()
            if int(self._marks[peer, _BEGUN]) < version + 2:
                return version
        return None

    def version(self, peer: int) -> int:
        return int(self._marks[peer, _LATEST])

    def latest(self) -> int:
        """The latest version of all ranks."""
        return int(self._marks[:, _LATEST].max())

    def _fence(self) -> None:
        """A full memory barrier: ARM may reorder stores and loads across processes.

        Releasing a lock and acquiring it again is the one full barrier that Python has.
        """
        with self._lock:
            pass
        with self._lock:
            pass


def page_bytes(num_bytes: int) -> int:
    return 2 * (-(-num_bytes // 64) * 64)
