"""A peer process that is killed, or stopped, in the middle of an operation over TCP."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
import torch

from shoal.comm.executors.scheduled import Scheduled
from shoal.comm.group import Group
from shoal.errors import PeerLost
from shoal.schedules.collectives.cost import Link
from shoal.transport.tcp.connect import TcpSpec
from shoal.transport.tcp.transport import TcpEngine, TcpTransport, is_built
from tests.transport.tcp import KEY

pytestmark = pytest.mark.skipif(not is_built(), reason="the native part is not built")
LARGE = 4_000_000


def joined(rank: int, pipe: Connection) -> TcpEngine:
    def exchange(message: bytes) -> list[bytes]:
        pipe.send_bytes(message)
        other = pipe.recv_bytes()
        return [message, other] if rank == 0 else [other, message]

    return TcpEngine(TcpSpec(rank, 2, KEY), exchange)


def peer(pipe: Connection) -> None:
    """Rank 1: answers one message and then does nothing."""
    engine = joined(1, pipe)
    transport = TcpTransport(engine)
    data = torch.zeros(1)
    transport.recv(data, 0, 1).wait()
    transport.send(data, 0, 2).wait()
    signal.pause()


@contextmanager
def two_processes() -> Iterator[tuple[TcpTransport, int]]:
    """The transport of rank 0, and the process of rank 1, which is ended afterwards."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=peer, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    engine = joined(0, ours)
    try:
        transport = TcpTransport(engine, timeout_s=20.0)
        data = torch.ones(1)
        transport.send(data, 1, 1).wait()
        transport.recv(data, 1, 2).wait()
        assert process.pid is not None
        yield transport, process.pid
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
        engine.close()


def receive(transport: TcpTransport) -> None:
    transport.recv(torch.zeros(LARGE), 1, 5).wait()


def send(transport: TcpTransport) -> None:
    transport.send(torch.zeros(LARGE), 1, 5).wait()


def all_reduce(transport: TcpTransport) -> None:
    Group(Scheduled(transport, {"all_reduce": "ring"}, Link())).all_reduce(
        torch.zeros(LARGE)
    ).wait()


OPERATIONS = [
    (receive, "recv from 1, tag 5"),
    (send, "send to 1, tag 5"),
    (all_reduce, "all_reduce"),
]


@pytest.mark.parametrize(
    ("operation", "doing"), OPERATIONS, ids=lambda o: getattr(o, "__name__", "")
)
def test_a_killed_or_stopped_peer_is_named_with_the_operation_and_the_timeout(
    operation: Callable[[TcpTransport], None], doing: str
) -> None:
    with two_processes() as (transport, pid):
        os.kill(pid, signal.SIGSTOP)
        transport.timeout_s = 0.3
        with pytest.raises(PeerLost, match=rf"rank 0 lost rank 1 after 0.3 s in {doing}"):
            operation(transport)
        transport.timeout_s = 20.0
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(PeerLost, match=rf"rank 0 lost rank 1 in {doing}"):
            operation(transport)
