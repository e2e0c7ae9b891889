"""Metadata of frames."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shoal.server.process.peer import HANDLERS
from shoal.server.process.server import HANDLER_MODULES
from shoal.server.protocol import FrameKind, Header
from shoal.server.protocol.connection import Closed, Connection, TimedOut

MEET = """
import sys, threading
import msgspec
from shoal.server.protocol import decode

sys.setswitchinterval(1e-6)

def meet(number):
    inner = msgspec.defstruct(f"Inner{number}", [("a", int), ("b", tuple[int, ...])])
    kind = msgspec.defstruct(f"Kind{number}", [("x", int), ("values", tuple[inner, ...])])
    sent, barrier, found = kind(1, (inner(1, (2,)),)), threading.Barrier(6), []

    def take():
        barrier.wait()
        found.append(decode(msgspec.msgpack.encode(sent), kind))

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [sent] * 6

for number in range(100):
    meet(number)
"""


def test_connections_that_meet_a_message_for_the_first_time_at_once() -> None:
    """In a process of its own: two threads that let msgspec look at a type at once crash it."""
    done = subprocess.run([sys.executable, "-c", MEET], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


HANDSHAKE = {FrameKind.CHALLENGE, FrameKind.HELLO, FrameKind.WELCOME}
ANSWERS = {FrameKind.OK, FrameKind.ERROR}
TO_FOLLOWERS = {FrameKind.ENTRY, FrameKind.COPIED_ROWS}
OTHER_LISTENERS = {FrameKind.COORDINATE, FrameKind.AVERAGE}


def test_every_request_has_a_handler() -> None:
    apart = HANDSHAKE | ANSWERS | TO_FOLLOWERS | OTHER_LISTENERS
    assert set(FrameKind) - apart == set(HANDLERS)
    modules = {module.__name__ for module in HANDLER_MODULES}
    assert {registered.handler.__module__ for registered in HANDLERS.values()} == modules


LARGE = memoryview(bytes(8 << 20))  # more than the buffers of a socket hold
Pair = tuple[Connection, Connection]


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = map(Connection, socket.socketpair())
    yield near, far
    near.close()
    far.close()


def test_a_frame_of_more_buffers_than_one_call_takes_arrives_whole(pair: Pair) -> None:
    near, far = pair
    near.send(Header(FrameKind.OK), b"", *[memoryview(b"%04d" % i) for i in range(3000)])
    received = bytearray(far.receive(1024)[0].payload_bytes)
    far.read_into(memoryview(received))
    assert received == b"".join(b"%04d" % i for i in range(3000))


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
