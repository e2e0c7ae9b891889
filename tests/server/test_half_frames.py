"""A frame that was sent or read in part is the last one of its connection."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from shoal.server.protocol.connection import Closed, Connection, TimedOut
from shoal.server.protocol.frames import FrameKind, Header

LARGE = memoryview(bytes(8 << 20))  # more than the buffers of a socket hold
Pair = tuple[Connection, Connection]


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = map(Connection, socket.socketpair())
    yield near, far
    near.close()
    far.close()


def test_after_a_send_that_timed_out_no_frame_is_sent_any_more(pair: Pair) -> None:
    near, far = pair
    near.sock.settimeout(0.01)
    with pytest.raises(TimedOut):
        near.send(Header(FrameKind.BUCKET), b"", LARGE)
    near.sock.settimeout(None)
    with pytest.raises(Closed, match="timed out"):
        near.send(Header(FrameKind.BUCKET), b"the next one")
    header, _ = far.receive(1024)
    with pytest.raises(Closed):
        far.skip(header.payload_bytes)


def test_after_a_read_that_timed_out_half_way_nothing_is_read_any_more(pair: Pair) -> None:
    near, far = pair
    far.sock.settimeout(0.01)
    near.sock.sendall(bytes(10))
    with pytest.raises(TimedOut):
        far.receive(1024)
    with pytest.raises(Closed, match="timed out"):
        far.receive(1024)
    with pytest.raises(Closed):
        near.send(Header(FrameKind.OK))


def test_an_interrupted_send_ends_the_connection(pair: Pair) -> None:
    class Interrupted(socket.socket):
        def sendmsg(self, *_: object) -> int:
            raise KeyboardInterrupt

    near, _ = pair
    near.sock = Interrupted(fileno=near.sock.detach())
    with pytest.raises(KeyboardInterrupt):
        near.send(Header(FrameKind.OK))
    with pytest.raises(Closed):
        near.send(Header(FrameKind.OK))
