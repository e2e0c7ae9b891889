"""The rendezvous of ranks that share memory: all attach, or none does."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.transport.shm import memfd
from shoal.transport.shm.memfd import Offer
from shoal.transport.shm.rank_memory import FREE_MARK, RankMemory
from tests.comm.threads import Table
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

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(main, range(size)))


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

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(main, range(2))) == [(b"AB", [10, 11], True, False)] * 2


def test_ranks_that_want_another_size_of_buffer_all_get_none() -> None:
    table = Table(2)
    before = memory_descriptors()

    def main(rank: int) -> RankMemory | None:
        return RankMemory.join(table.exchange(rank), rank, 2, 16 + 64 * rank)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(main, range(2))) == [None, None]
    assert memory_descriptors() == before
