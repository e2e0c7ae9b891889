"""Which large messages a rank asks for: of several senders none gets far ahead of the others."""

from __future__ import annotations

import select
import socket
import struct
import weakref
from typing import Any

import pytest
import torch

from shoal.comm.transport.tcp.transport import is_built

if not is_built():
    pytest.skip("the native part is not built", allow_module_level=True)

from shoal.comm.transport.tcp import _tcp

MAGIC, EAGER, RTS, CTS, DATA = 0x31706374, 1, 2, 3, 5
HEAD = struct.Struct("<4I4Q80s")
DESCRIPTOR = b"d"
NUM_BYTES = 1 << 16  # more than goes without being asked for
CALL, READY = 7, 8  # tags
PATIENCE_NS = 20 * 10**9
COPY = -1


class Sender:
    """The other end of a connection, frame by frame."""

    def __init__(self, handle: Any, rank: int):
        ours, self._sock = socket.socketpair()
        self._sock.settimeout(20)
        ours.setblocking(False)
        _tcp.add_peer(handle, rank, (ours.detach(),))

    def say(self, kind: int, tag: int, message: int, num_bytes: int, payload: bytes = b"") -> None:
        head = (MAGIC, kind, 0, len(DESCRIPTOR), tag, message, num_bytes, 0, DESCRIPTOR)
        self._sock.sendall(HEAD.pack(*head) + payload)

    def asked(self, count: int) -> list[int]:
        """The next messages that it is asked for."""
        heads = [HEAD.unpack(self._sock.recv(HEAD.size, socket.MSG_WAITALL)) for _ in range(count)]
        assert {head[1] for head in heads} <= {CTS}
        return [head[5] for head in heads]

    def is_asked_for_no_more(self) -> bool:
        return not select.select([self._sock], [], [], 0)[0]

    def close(self) -> None:
        self._sock.close()


def test_a_sender_waits_for_one_that_is_a_message_behind_in_the_same_call() -> None:
    handle = _tcp.create(0, 3)
    fast, slow = senders = [Sender(handle, rank) for rank in (1, 2)]
    memory = [torch.zeros(NUM_BYTES, dtype=torch.uint8) for _ in range(6)]

    def receive(data: torch.Tensor, num_bytes: int, peer: int, tag: int) -> int:
        return _tcp.post(handle, 0, data, num_bytes, peer, 0, tag, DESCRIPTOR, 0, COPY)

    try:
        for rank, sender in enumerate(senders, 1):
            for message in range(3):
                sender.say(RTS, CALL, message, NUM_BYTES)
            sender.say(EAGER, READY, 3, 1, b"!")
            one = receive(torch.zeros(1, dtype=torch.uint8), 1, rank, READY)
            assert _tcp.wait(handle, one, PATIENCE_NS)[0] == 0  # so it has read what came before
        for number, data in enumerate(memory):
            receive(data, NUM_BYTES, 2 - number % 2, CALL)
        assert slow.asked(3) == [0, 1, 2]
        assert fast.asked(1) == [0]
        assert fast.is_asked_for_no_more()
        slow.say(DATA, CALL, 0, NUM_BYTES, bytes(NUM_BYTES))
        assert fast.asked(2) == [1, 2]
    finally:
        _tcp.stop(handle)
        for sender in senders:
            sender.close()


def test_the_memory_of_a_receive_is_kept_until_it_is_forgotten() -> None:
    handle = _tcp.create(0, 2)
    sender = Sender(handle, 1)
    data = torch.zeros(1, dtype=torch.uint8)
    kept = weakref.ref(data)
    try:
        op = _tcp.post(handle, 0, data, 1, 1, 0, READY, DESCRIPTOR, 0, COPY)
        del data
        assert kept() is not None
        sender.say(EAGER, READY, 0, 1, b"!")
        assert _tcp.wait(handle, op, PATIENCE_NS)[0] == 0
        arrived = kept()
        assert arrived is not None and arrived.item() == ord("!")
        del arrived
        _tcp.forget(handle, op)
        assert kept() is None
    finally:
        _tcp.stop(handle)
        sender.close()
