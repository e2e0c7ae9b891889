"""One suite for every transport, on threads; and what is particular to some."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from benchmarks.thread_transport import Mailboxes, ThreadTransport
from shoal.comm.transport.tcp.transport import TcpTransport, is_built
from shoal.comm.transport.transport import SubsetTransport, Transport
from shoal.errors import PeerLost, ShoalError
from tests.comm.cases import DTYPES
from tests.comm.threads import on_tcp

Connect = Callable[[int, Callable[[Transport], Any]], list[Any]]
"""Run a body on every rank; what it returned or raised, by rank. Who raises breaks the world."""
native = pytest.mark.skipif(not is_built(), reason="the native part is not built")


def run_threads(size: int, body: Callable[[Transport], Any]) -> list[Any]:
    boxes = Mailboxes(size)

    def rank_body(rank: int) -> Any:
        try:
            return body(ThreadTransport(boxes, rank))
        except BaseException as error:
            boxes.break_all(rank)
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_body, range(size)))


def run_subset(size: int, body: Callable[[Transport], Any]) -> list[Any]:
    """Every other rank of a larger world, in reverse."""
    chosen = range(2 * size - 1, 0, -2)

    def on_member(transport: Transport) -> Any:
        if transport.rank in chosen:
            return body(SubsetTransport(transport, chosen))

    outcomes = run_threads(2 * size, on_member)
    return [outcomes[rank] for rank in chosen]


@pytest.fixture(params=[run_threads, run_subset, pytest.param(on_tcp, marks=native)])
def connect(request: pytest.FixtureRequest) -> Connect:
    return request.param  # type: ignore[no-any-return]


def carried(connect: Connect, data: torch.Tensor, into: torch.Tensor) -> Any:
    """What rank 1 has, or raised, after rank 0 has sent it `data`."""

    def body(transport: Transport) -> torch.Tensor:
        if transport.rank == 0:
            transport.send(data, 1, 0).wait()
        else:
            transport.recv(into, 0, 0).wait()
        return into

    return connect(2, body)[1]


def test_messages_go_by_source_and_tag_and_in_order(connect: Connect) -> None:
    tags = (1, 2, 1 << 41)

    def body(transport: Transport) -> list[float]:
        if transport.rank < 2:
            for number, tag in itertools.product(range(9), tags):
                data = torch.tensor([100.0 * transport.rank + 10 * tags.index(tag) + number])
                transport.send(data, 2, tag).wait()
            return []
        into = torch.zeros(54, 1)
        asked = itertools.product((1, 0), reversed(tags), range(9))
        works = [transport.recv(into[i], src, tag) for i, (src, tag, _) in enumerate(asked)]
        for work in works:
            work.wait()
        return into.flatten().tolist()

    expected = itertools.product((100, 0), (20, 10, 0), range(9))
    assert connect(3, body)[2] == list(map(sum, expected))


def test_a_rank_may_send_to_itself(connect: Connect) -> None:
    def body(transport: Transport) -> float:
        into = torch.zeros(1)
        sent = transport.send(torch.tensor([3.0]), transport.rank, 0)
        transport.recv(into, transport.rank, 0).wait()
        sent.wait()
        return into.item()

    assert connect(2, body) == [3.0, 3.0]


def test_all_may_send_before_anyone_receives(connect: Connect) -> None:
    def body(transport: Transport) -> list[float]:
        sent = [
            transport.send(torch.full((1 << 16,), float(transport.rank)), dst, 0)
            for dst in range(transport.size)
        ]
        into = torch.empty(transport.size, 1 << 16)
        for src in range(transport.size):
            transport.recv(into[src], src, 0).wait()
        for work in sent:
            work.wait()
        return [row.unique().item() for row in into]

    assert connect(3, body) == [[0.0, 1.0, 2.0]] * 3


def test_data_may_change_once_the_send_is_done(connect: Connect) -> None:
    def body(transport: Transport) -> float | None:
        if transport.rank == 0:
            data = torch.ones(4)
            transport.send(data, 1, 0).wait()
            data.zero_()
            transport.send(torch.zeros(0), 1, 1).wait()
            return None
        into = torch.zeros(4)
        transport.recv(torch.zeros(0), 0, 1).wait()
        transport.recv(into, 0, 0).wait()
        return into.sum().item()

    assert connect(2, body)[1] == 4.0


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_arrives_bit_for_bit(connect: Connect, name: str) -> None:
    noise = torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(0))
    bits = noise.to(torch.uint8)
    data = (noise % 2).bool() if name == "bool" else bits.view(DTYPES[name])

    got = carried(connect, data, torch.zeros_like(data))
    assert torch.equal(got.view(torch.uint8), data.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (1, 2, 0)], ids=str)
def test_every_shape_arrives(connect: Connect, shape: tuple[int, ...]) -> None:
    data = torch.full(shape, 2.0)
    assert torch.equal(carried(connect, data, torch.zeros(shape)), data)


@pytest.mark.parametrize(
    "into", [torch.zeros(3), torch.zeros(2, 2), torch.zeros(4, dtype=torch.float64)], ids=repr
)
def test_a_message_of_another_shape_or_dtype_is_an_error(
    connect: Connect, into: torch.Tensor
) -> None:
    error = carried(connect, torch.ones(4), into)
    assert type(error) is ShoalError
    assert str(tuple(into.shape)) in str(error) and "(4,)" in str(error)
    assert not into.any()


def test_waiting_again_changes_nothing_and_fails_again(connect: Connect) -> None:
    def body(transport: Transport) -> float:
        into = torch.zeros(1)
        for _ in range(2):
            transport.send(torch.ones(1), transport.rank, 0).wait()
        work = transport.recv(into, transport.rank, 0)
        work.wait()
        into.zero_()
        work.wait()
        failing = transport.recv(torch.zeros(3), transport.rank, 0)
        for _ in range(2):
            with pytest.raises(ShoalError):
                failing.wait()
        return into.item()

    assert connect(1, body) == [0.0]


def test_a_broken_world_wakes_everyone_who_waits(connect: Connect) -> None:
    def body(transport: Transport) -> None:
        if transport.rank == 0:
            raise KeyError("rank 0 fails")
        transport.recv(torch.zeros(1), 0, 0).wait()

    first, *others = connect(4, body)
    assert isinstance(first, KeyError)
    assert [type(error) for error in others] == [PeerLost] * 3
    assert len({error.rank for error in others}) == 3


# ------------------------------------------------------------------ of one transport


@native
@pytest.mark.parametrize("streams", [1, 4])
def test_large_messages_go_both_ways_at_once_and_are_added_on_arrival(streams: int) -> None:
    def body(transport: TcpTransport) -> torch.Tensor:
        peer = 1 - transport.rank
        data = torch.arange(1 << 20, dtype=torch.float32) + transport.rank
        total = torch.full_like(data, 0.5)
        arrives = transport.recv_reduce(total, peer, 1, "sum")
        sent = transport.send(data, peer, 1)
        arrives.wait()
        sent.wait()
        return total

    for rank, total in enumerate(on_tcp(2, body, streams=streams)):
        assert torch.equal(total, torch.arange(1 << 20, dtype=torch.float32) + 1.5 - rank)


def test_a_message_sent_before_the_world_broke_still_arrives() -> None:
    boxes = Mailboxes(2)
    ThreadTransport(boxes, 0).send(torch.ones(1), 1, 0)
    boxes.break_all(0)
    into = torch.zeros(1)
    ThreadTransport(boxes, 1).recv(into, 0, 0).wait()
    assert into.item() == 1.0


def test_the_first_rank_that_failed_is_the_one_named() -> None:
    boxes = Mailboxes(3)
    boxes.break_all(2)
    boxes.break_all(0)
    with pytest.raises(PeerLost, match="rank 1 lost rank 2 in recv tag 4") as caught:
        ThreadTransport(boxes, 1).recv(torch.zeros(1), 0, 4).wait()
    assert caught.value.peer == 2 and caught.value.after_s is None


def test_silence_ends_after_the_timeout() -> None:
    boxes = Mailboxes(2, timeout_s=0.01)
    with pytest.raises(PeerLost, match=r"rank 1 lost rank 0 after 0\.01 s in recv tag 0"):
        ThreadTransport(boxes, 1).recv(torch.zeros(1), 0, 0).wait()
