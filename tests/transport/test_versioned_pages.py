"""Pages of shared memory that are read without waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from shoal.transport.shm import versioned_pages
from shoal.transport.shm.rank_memory import RankMemory
from shoal.transport.shm.versioned_pages import VersionedPages, page_bytes
from tests.comm.threads import Table

T = TypeVar("T")


def on_pages(size: int, num_bytes: int, work: Callable[[VersionedPages, int], T]) -> list[T]:
    table = Table(size)

    def main(rank: int) -> T:
        ranks = RankMemory.join(table.exchange(rank), rank, size, size * page_bytes(num_bytes))
        assert ranks is not None
        try:
            return work(VersionedPages(ranks, num_bytes), rank)
        finally:
            ranks.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(main, range(size)))


def page(value: int, num_bytes: int = 100) -> np.ndarray:
    return np.full(num_bytes, value, dtype=np.uint8)


def test_the_latest_version_is_read_and_only_once() -> None:
    barrier = threading.Barrier(2, timeout=60)

    def work(pages: VersionedPages, rank: int) -> list[tuple[int | None, int]]:
        into = page(0)
        seen = []
        if rank == 0:
            seen.append((pages.read(1, into), int(into[0])))
        barrier.wait()
        if rank == 1:
            pages.write(page(7))
            pages.write(page(8))
        barrier.wait()
        if rank == 0:
            version = pages.read(1, into)
            seen.append((version, int(into[0])))
            seen.append((pages.read(1, into, newer_than=2), int(into[0])))
        return seen

    assert on_pages(2, 100, work)[0] == [(None, 0), (2, 8), (None, 8)]


def test_a_page_is_never_read_half_written() -> None:
    """Each version is one value all over; a reader that overlaps two would see both."""
    done = threading.Event()

    def work(pages: VersionedPages, rank: int) -> int:
        if rank == 0:
            for value in range(300):
                pages.write(page(value % 256, 1 << 16))
            done.set()
            return 0
        into = page(0, 1 << 16)
        reads = 0
        seen = 0
        while not done.is_set() or seen < pages.version(0):
            version = pages.read(0, into, seen)
            if version is not None:
                assert into.min() == into.max() == (version - 1) % 256
                reads = reads + 1
                seen = version
        return reads

    assert on_pages(2, 1 << 16, work)[1] > 0


def test_a_reader_that_is_overtaken_gives_up() -> None:
    def work(pages: VersionedPages, rank: int) -> int | None:
        pages.write(page(1))
        pages._marks[0, versioned_pages._BEGUN] = 3  # the writer is in the slot of version 1 again
        return pages.read(0, page(0))

    assert on_pages(1, 100, work) == [None]


def test_a_closed_page_stays_readable() -> None:
    closed = threading.Barrier(2, timeout=60)
    table = Table(2)

    def main(rank: int) -> int:
        ranks = RankMemory.join(table.exchange(rank), rank, 2, 2 * page_bytes(100))
        assert ranks is not None
        pages = VersionedPages(ranks, 100)
        pages.write(page(rank + 1))
        if rank == 0:
            ranks.close()
        closed.wait()
        into = page(0)
        pages.read(0, into)
        assert ranks.has_closed(0) and not ranks.has_died(0)
        ranks.close()
        return int(into[0])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(main, range(2))) == [1, 1]
