"""Pages of shared memory, one writer each: every rank reads them at any time, without waiting.

    page of a rank    begun and latest (among its marks)    [ slot 0 ]  [ slot 1 ]

A seqlock with two slots. Version v is written into slot v % 2 and then becomes the latest, so only
the writing of v + 2 disturbs a reader of v. The reader checks `begun` afterwards and tries again.
A rank that has died or closed leaves its last version there.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from shoal.transport.shm.rank_memory import FREE_MARK, RankMemory

Bytes = NDArray[np.uint8]
_BEGUN, _LATEST = FREE_MARK, FREE_MARK + 1
_ATTEMPTS = 4


class VersionedPages:
    """The pages of all ranks, of `num_bytes` each, in a memory of `page_bytes` for each rank."""

    def __init__(self, ranks: RankMemory, num_bytes: int):
        self._rank = ranks.rank
        self._marks = ranks.marks
        self._marks[ranks.rank, _BEGUN] = self._marks[ranks.rank, _LATEST]  # it may have come back
        self._slots = [
            [_slot(ranks, num_bytes, 2 * rank + index) for index in (0, 1)]
            for rank in range(ranks.size)
        ]
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


def _slot(ranks: RankMemory, num_bytes: int, number: int) -> Bytes:
    offset = ranks.offset + number * _padded(num_bytes)
    return np.frombuffer(ranks.memory, np.uint8, num_bytes, offset)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


def page_bytes(num_bytes: int) -> int:
    return 2 * _padded(num_bytes)
