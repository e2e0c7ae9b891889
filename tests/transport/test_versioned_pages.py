"""Pages of shared memory that are read without waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest

from shoal.transport.shm import versioned_pages
from shoal.transport.shm.versioned_pages import VersionedPages
from tests.comm.shm import Table
from tests.descriptors import memory_descriptors

T = TypeVar("T")


def on_pages(size: int, num_bytes: int, work: Callable[[VersionedPages], T]) -> list[T]:
    table = Table(size)

    def main(rank: int) -> T:
        pages = VersionedPages.join(table.exchange(rank), rank, num_bytes)
        assert pages is not None
        try:
            return work(pages)
        finally:
            table.exchange(rank)(b"")  # no rank closes while another still reads
            pages.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(main, range(size)))


def page(value: int, num_bytes: int = 100) -> np.ndarray:
    return np.full(num_bytes, value, dtype=np.uint8)


def test_the_latest_version_is_read_and_only_once() -> None:
    barrier = threading.Barrier(2, timeout=60)

    def work(pages: VersionedPages) -> list[tuple[int | None, int]]:
        into = page(0)
        seen = []
        if pages.rank == 0:
            seen.append((pages.read(1, into), int(into[0])))
        barrier.wait()
        if pages.rank == 1:
            pages.write(page(7))
            pages.write(page(8))
        barrier.wait()
        if pages.rank == 0:
            version = pages.read(1, into)
            seen.append((version, int(into[0])))
            seen.append((pages.read(1, into, newer_than=2), int(into[0])))
        return seen

    assert on_pages(2, 100, work)[0] == [(None, 0), (2, 8), (None, 8)]


def test_a_page_is_never_read_half_written() -> None:
    """Each version is one value all over; a reader that overlaps two would see both."""
    done = threading.Event()

    def work(pages: VersionedPages) -> int:
        if pages.rank == 0:
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
    def work(pages: VersionedPages) -> int | None:
        pages.write(page(1))
        first = pages._pages[0]
        first.header[versioned_pages._BEGUN] = 3  # the writer is in the slot of version 1 again
        return pages.read(0, page(0))

    assert on_pages(1, 100, work) == [None]


def test_a_closed_page_stays_readable() -> None:
    first = Table(2)
    second = threading.Barrier(2, timeout=60)

    def main(rank: int) -> int:
        pages = VersionedPages.join(first.exchange(rank), rank, 100)
        assert pages is not None
        pages.write(page(rank + 1))
        if rank == 0:
            pages.close()
            second.wait()
            return 0
        second.wait()
        into = page(0)
        pages.read(0, into)
        assert pages.has_closed(0) and not pages.has_died(0)
        pages.close()
        return int(into[0])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(main, range(2))) == [0, 1]


@pytest.mark.parametrize("refuses", [0, 1])
def test_where_one_rank_cannot_all_get_none(refuses: int) -> None:
    table = Table(2)
    before = memory_descriptors()

    def main(rank: int) -> VersionedPages | None:
        size = 100 if rank == refuses else 200  # another model: its page is not taken
        return VersionedPages.join(table.exchange(rank), rank, size)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(main, range(2))) == [None, None]
    assert memory_descriptors() == before
