"""One suite for every transport. A subclass gives a `connect` fixture and inherits the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.errors import PeerLost, ShoalError
from shoal.transport.transport import Transport

Connect = Callable[[int, Callable[[Transport], Any]], list[Any]]
"""Run a body on every rank; what it returned or raised, by rank. Who raises breaks the world."""

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def carried(connect: Connect, data: torch.Tensor, into: torch.Tensor) -> Any:
    """What rank 1 has, or raised, after rank 0 has sent it `data`."""

    def body(transport: Transport) -> torch.Tensor:
        if transport.rank == 0:
            transport.send(data, 1, 0).wait()
        else:
            transport.recv(into, 0, 0).wait()
        return into

    return connect(2, body)[1]


class TransportConformance:
    def test_messages_with_one_tag_arrive_in_order(self, connect: Connect) -> None:
        def body(transport: Transport) -> list[float]:
            if transport.rank == 0:
                for i in range(20):
                    transport.send(torch.tensor([float(i)]), 1, 7).wait()
                return []
            into = torch.zeros(20, 1)
            works = [transport.recv(into[i], 0, 7) for i in range(20)]
            for work in works:
                work.wait()
            return into.flatten().tolist()

        assert connect(2, body)[1] == list(range(20))

    def test_different_tags_do_not_mix(self, connect: Connect) -> None:
        def body(transport: Transport) -> list[float]:
            if transport.rank == 0:
                for tag in (1, 2, 1 << 41):
                    transport.send(torch.tensor([float(tag)]), 1, tag).wait()
                return []
            into = torch.zeros(3, dtype=torch.float32)
            for i, tag in enumerate((1 << 41, 1, 2)):
                transport.recv(into[i : i + 1], 0, tag).wait()
            return into.tolist()

        assert connect(2, body)[1] == [float(1 << 41), 1.0, 2.0]

    def test_different_sources_do_not_mix(self, connect: Connect) -> None:
        def body(transport: Transport) -> list[float]:
            if transport.rank < 2:
                transport.send(torch.tensor([float(transport.rank)]), 2, 0).wait()
                return []
            into = torch.full((2,), -1.0)
            transport.recv(into[1:], 1, 0).wait()
            transport.recv(into[:1], 0, 0).wait()
            return into.tolist()

        assert connect(3, body)[2] == [0.0, 1.0]

    def test_a_rank_may_send_to_itself(self, connect: Connect) -> None:
        def body(transport: Transport) -> float:
            into = torch.zeros(1)
            sent = transport.send(torch.tensor([3.0]), transport.rank, 0)
            transport.recv(into, transport.rank, 0).wait()
            sent.wait()
            return into.item()

        assert connect(2, body) == [3.0, 3.0]

    def test_all_may_send_before_anyone_receives(self, connect: Connect) -> None:
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

    def test_data_may_change_once_the_send_is_done(self, connect: Connect) -> None:
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

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype_arrives_bit_for_bit(self, connect: Connect, dtype: torch.dtype) -> None:
        noise = torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(0))
        bits = noise.to(torch.uint8).view(torch.uint8)
        data = (noise % 2).bool() if dtype is torch.bool else bits.view(dtype)

        got = carried(connect, data, torch.zeros_like(data))
        assert torch.equal(got.view(torch.uint8), data.view(torch.uint8))

    @pytest.mark.parametrize("shape", [(), (0,), (2, 3), (1, 2, 0)], ids=str)
    def test_every_shape_arrives(self, connect: Connect, shape: tuple[int, ...]) -> None:
        data = torch.full(shape, 2.0)
        assert torch.equal(carried(connect, data, torch.zeros(shape)), data)

    @pytest.mark.parametrize(
        "into", [torch.zeros(3), torch.zeros(2, 2), torch.zeros(4, dtype=torch.float64)], ids=repr
    )
    def test_a_message_of_another_shape_or_dtype_is_an_error(
        self, connect: Connect, into: torch.Tensor
    ) -> None:
        error = carried(connect, torch.ones(4), into)
        assert type(error) is ShoalError
        assert str(tuple(into.shape)) in str(error) and "(4,)" in str(error)
        assert not into.any()

    def test_waiting_again_changes_nothing(self, connect: Connect) -> None:
        def body(transport: Transport) -> float:
            into = torch.zeros(1)
            transport.send(torch.ones(1), transport.rank, 0).wait()
            work = transport.recv(into, transport.rank, 0)
            work.wait()
            into.zero_()
            work.wait()
            return into.item()

        assert connect(1, body) == [0.0]

    def test_what_failed_once_fails_again(self, connect: Connect) -> None:
        def body(transport: Transport) -> list[str]:
            transport.send(torch.ones(4), transport.rank, 0).wait()
            work = transport.recv(torch.zeros(3), transport.rank, 0)
            raised = []
            for _ in range(2):
                try:
                    work.wait()
                except ShoalError as error:
                    raised.append(type(error).__name__)
            return raised

        assert connect(1, body) == [["ShoalError", "ShoalError"]]

    def test_a_broken_world_wakes_everyone_who_waits(self, connect: Connect) -> None:
        def body(transport: Transport) -> None:
            if transport.rank == 0:
                raise KeyError("rank 0 fails")
            transport.recv(torch.zeros(1), 0, 0).wait()

        first, *others = connect(4, body)
        assert isinstance(first, KeyError)
        assert [type(error) for error in others] == [PeerLost] * 3
        assert len({error.rank for error in others}) == 3
