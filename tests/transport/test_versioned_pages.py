"""Pages of shared memory that nobody waits for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest

from shoal.transport.shm import versioned_pages as pages
from shoal.transport.shm.versioned_pages import Board
from tests.comm.shm import Table

T = TypeVar("T")


def on_board(size: int, num_bytes: int, work: Callable[[Board], T]) -> list[T]:
    table = Table(size)

    def main(rank: int) -> T:
        board = Board.meet(table.exchange(rank), rank, size, num_bytes)
        assert board is not None
        try:
            return work(board)
        finally:
            table.exchange(rank)(b"")  # nobody closes while another still looks
            board.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(main, range(size)))


def page(value: int, num_bytes: int = 100) -> np.ndarray:
    return np.full(num_bytes, value, dtype=np.uint8)


def test_the_latest_version_is_read_and_only_once() -> None:
    barrier = threading.Barrier(2, timeout=20)

    def work(board: Board) -> list[tuple[int | None, int]]:
        into = page(0)
        seen = []
        if board.rank == 0:
            seen.append((board.read(1, into), int(into[0])))
        barrier.wait()
        if board.rank == 1:
            board.write(page(7))
            board.write(page(8))
        barrier.wait()
        if board.rank == 0:
            version = board.read(1, into)
            seen.append((version, int(into[0])))
            seen.append((board.read(1, into, newer_than=2), int(into[0])))
        return seen

    assert on_board(2, 100, work)[0] == [(None, 0), (2, 8), (None, 8)]


def test_a_page_is_never_read_half_written() -> None:
    """Each version is one value all over; a reader that overlaps two would see both."""
    done = threading.Event()

    def work(board: Board) -> int:
        if board.rank == 0:
            for value in range(300):
                board.write(page(value % 256, 1 << 16))
            done.set()
            return 0
        into = page(0, 1 << 16)
        reads = 0
        seen = 0
        while not done.is_set() or seen < board.version(0):
            version = board.read(0, into, seen)
            if version is not None:
                assert into.min() == into.max() == (version - 1) % 256
                reads = reads + 1
                seen = version
        return reads

    assert on_board(2, 1 << 16, work)[1] > 0


def test_a_reader_that_is_overtaken_gives_up() -> None:
    def work(board: Board) -> int | None:
        board.write(page(1))
        own = board._pages[0]
        own.head[pages._BEGUN] = 3  # as if the writer were in the slot of version 1 again
        return board.read(0, page(0))

    assert on_board(1, 100, work) == [None]


def test_a_closed_page_stays_readable() -> None:
    first = Table(2)
    second = threading.Barrier(2, timeout=20)

    def main(rank: int) -> int:
        board = Board.meet(first.exchange(rank), rank, 2, 100)
        assert board is not None
        board.write(page(rank + 1))
        if rank == 0:
            board.close()
            second.wait()
            return 0
        second.wait()
        into = page(0)
        board.read(0, into)
        assert board.has_closed(0) and not board.has_died(0)
        board.close()
        return int(into[0])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(main, range(2))) == [0, 1]


@pytest.mark.parametrize("refuses", [0, 1])
def test_where_one_rank_cannot_all_get_none(refuses: int) -> None:
    table = Table(2)
    before = set(os.listdir("/proc/self/fd"))

    def main(rank: int) -> Board | None:
        size = 100 if rank == refuses else 200  # another model: its page is not taken
        return Board.meet(table.exchange(rank), rank, 2, size)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(main, range(2))) == [None, None]
    assert set(os.listdir("/proc/self/fd")) == before
