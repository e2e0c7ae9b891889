"""Ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from shoal.errors import PeerLost
from shoal.transport.threads import Mailboxes, ThreadTransport
from shoal.transport.transport import SubsetTransport, Transport
from tests.transport.conformance import Connect, TransportConformance


class TestThreadTransport(TransportConformance):
    @pytest.fixture
    def connect(self) -> Connect:
        return run_threads


class TestSubsetOfThreads(TransportConformance):
    """Every other rank of a larger world, in reverse."""

    @pytest.fixture
    def connect(self) -> Connect:
        def run(size: int, body: Callable[[Transport], Any]) -> list[Any]:
            chosen = range(2 * size - 1, 0, -2)

            def on_member(transport: Transport) -> Any:
                if transport.rank in chosen:
                    return body(SubsetTransport(transport, chosen))

            outcomes = run_threads(2 * size, on_member)
            return [outcomes[rank] for rank in chosen]

        return run


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
