"""Memory that ranks share: all attach, or none does. Its pages are read without waiting."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

from shoal.comm.transport.shm import memfd, rank_memory
from shoal.comm.transport.shm.memfd import Offer
from shoal.comm.transport.shm.rank_memory import FREE_MARK, RankMemory, VersionedPages, page_bytes
from tests.comm.threads import Table, on_ranks
from tests.descriptors import memory_descriptors

NUM_BYTES = 4096


def meet(size: int, attach: Callable[[int, list[Offer]], int]) -> list[int | None]:
    """Rank 0 makes memory and all open it; the descriptors, by rank."""
    table = Table(size)

    def main(rank: int) -> int | None:
        fd = memfd.make("test", NUM_BYTES, 7) if rank == 0 else -1
        return memfd.rendezvous(
            table.exchange(rank), fd, lambda offers: attach(rank, offers), os.close, 7
        )

    return on_ranks(size, main)


def test_all_ranks_open_the_same_memory() -> None:
    before = memory_descriptors()
    handles = meet(3, lambda rank, offers: offers[0].open_checked(NUM_BYTES))
    inodes = {os.fstat(fd).st_ino for fd in handles if fd is not None}
    for fd in handles:
        assert fd is not None
        os.close(fd)
    assert len(inodes) == 1
    assert memory_descriptors() == before  # the offer itself was closed


@pytest.mark.parametrize("refuses", [0, 2])
@pytest.mark.parametrize("error", [OSError("no"), ValueError("no")])
def test_where_one_rank_fails_all_get_none_and_no_descriptor_stays(
    refuses: int, error: Exception
) -> None:
    before = memory_descriptors()

    def attach(rank: int, offers: list[Offer]) -> int:
        if rank == refuses:
            raise error
        return offers[0].open_checked(NUM_BYTES)

    assert meet(3, attach) == [None, None, None]
    assert memory_descriptors() == before


def test_an_exchange_that_fails_leaves_no_descriptor_behind() -> None:
    before = memory_descriptors()
    rounds = iter([True, False])

    def exchange(text: bytes) -> list[bytes]:
        if not next(rounds):
            raise TimeoutError("no answer")
        return [text]

    fd = memfd.make("test", NUM_BYTES)
    with pytest.raises(TimeoutError):
        memfd.rendezvous(exchange, fd, lambda offers: offers[0].open(), os.close)
    assert memory_descriptors() == before


def test_a_damaged_offer_is_a_refusal() -> None:
    answers = iter([[b"1 2"], [b"no"]])
    attached = memfd.rendezvous(lambda _: next(answers), -1, lambda offers: 1, os.close)
    assert attached is None


@pytest.mark.parametrize(
    ("num_bytes", "generation"), [(NUM_BYTES + 1, 7), (NUM_BYTES - 1, 7), (NUM_BYTES, 8)]
)
def test_memory_of_another_size_or_generation_is_refused(num_bytes: int, generation: int) -> None:
    fd = memfd.make("test", NUM_BYTES, 7)
    before = memory_descriptors()
    with pytest.raises(ValueError, match="offers other memory"):
        Offer(os.getpid(), fd, generation).open_checked(num_bytes)
    assert memory_descriptors() == before
    os.close(fd)


def test_memory_without_seals_is_refused() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NUM_BYTES)
    with pytest.raises(ValueError, match="sealed"):
        Offer(os.getpid(), fd).open_checked(NUM_BYTES)
    os.close(fd)


def test_ranks_write_one_buffer_and_see_who_has_finished() -> None:
    table = Table(2)

    def main(rank: int) -> tuple[bytes, list[int], bool, bool]:
        buffer = RankMemory.join(table.exchange(rank), rank, 2, 16)
        assert buffer is not None
        buffer.memory[buffer.offset + rank] = 65 + rank
        buffer.marks[rank, FREE_MARK] = 10 + rank
        table.exchange(rank)(b"")
        if rank == 1:
            buffer.close()
        table.exchange(rank)(b"")
        ended = buffer.has_finished(1), buffer.has_died(1)
        body = buffer.memory[buffer.offset : buffer.offset + 2]
        steps = buffer.marks[:, FREE_MARK].tolist()
        if rank == 0:
            buffer.close()
        return body, steps, *ended

    assert on_ranks(2, main) == [(b"AB", [10, 11], True, False)] * 2


def test_ranks_that_want_another_size_of_buffer_all_get_none() -> None:
    table = Table(2)
    before = memory_descriptors()

    def main(rank: int) -> RankMemory | None:
        return RankMemory.join(table.exchange(rank), rank, 2, 16 + 64 * rank)

    assert on_ranks(2, main) == [None, None]
    assert memory_descriptors() == before


# ------------------------------------------------------------------ versioned pages


T = TypeVar("T")


def on_pages(size: int, num_bytes: int, work: Callable[[VersionedPages, RankMemory], T]) -> list[T]:
    table = Table(size)

    def main(rank: int) -> T:
        ranks = RankMemory.join(table.exchange(rank), rank, size, size * page_bytes(num_bytes))
        assert ranks is not None
        try:
            return work(VersionedPages(ranks, num_bytes), ranks)
        finally:
            ranks.close()

    return on_ranks(size, main)


def page(value: int, num_bytes: int = 100) -> np.ndarray:
    return np.full(num_bytes, value, dtype=np.uint8)


def test_the_latest_version_is_read_and_only_once() -> None:
    barrier = threading.Barrier(2, timeout=60)

    def work(pages: VersionedPages, ranks: RankMemory) -> list[tuple[int | None, int]]:
        into = page(0)
        seen = []
        if ranks.rank == 0:
            seen.append((pages.read(1, into), int(into[0])))
        barrier.wait()
        if ranks.rank == 1:
            pages.write(page(7))
            pages.write(page(8))
        barrier.wait()
        if ranks.rank == 0:
            version = pages.read(1, into)
            seen.append((version, int(into[0])))
            seen.append((pages.read(1, into, newer_than=2), int(into[0])))
        return seen

    assert on_pages(2, 100, work)[0] == [(None, 0), (2, 8), (None, 8)]


def test_a_page_is_never_read_half_written() -> None:
    """Each version is one value all over; a reader that overlaps two would see both."""
    done = threading.Event()

    def work(pages: VersionedPages, ranks: RankMemory) -> int:
        if ranks.rank == 0:
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
    def work(pages: VersionedPages, ranks: RankMemory) -> int | None:
        pages.write(page(1))
        pages._marks[0, rank_memory._BEGUN] = 3  # the writer is in the slot of version 1 again
        return pages.read(0, page(0))

    assert on_pages(1, 100, work) == [None]


def test_a_closed_page_stays_readable() -> None:
    closed = threading.Barrier(2, timeout=60)

    def work(pages: VersionedPages, ranks: RankMemory) -> int:
        pages.write(page(ranks.rank + 1))
        if ranks.rank == 0:
            ranks.close()
        closed.wait()
        into = page(0)
        pages.read(0, into)
        assert ranks.has_closed(0) and not ranks.has_died(0)
        return int(into[0])

    assert on_pages(2, 100, work) == [1, 1]
