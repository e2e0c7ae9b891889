"""Hostile bytes at the socket of a coordinator: refused, counted; others are served."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest

from shoal.coordinator import List
from shoal.coordinator.client import RemoteCoordinator
from shoal.coordinator.service import CoordinatorService
from shoal.errors import ShoalError
from shoal.protocol import FrameKind, Header, encode, pack
from shoal.protocol.connection import Connection
from shoal.protocol.endpoint import connect
from shoal.protocol.handshake import AuthenticationError, authenticate
from shoal.runtime.secret import new_secret
from tests.coordinator.helpers import SECRET, service
from tests.processes import resident_mb

CLIENT = 99


@contextmanager
def victim() -> Iterator[CoordinatorService]:
    """A coordinator with one honest client, which is served at the end as at the start."""
    with service() as found, RemoteCoordinator(found.addresses[0], SECRET) as honest:
        before = honest.put_if("chain/0", b"honest", 0)
        memory_mb = resident_mb()
        yield found
        assert resident_mb() - memory_mb < 50
        assert honest.list("").entries == {"chain/0": before}
        assert honest.put_if("chain/0", b"after", before.version).version == before.version + 1


def member(found: CoordinatorService) -> Connection:
    """A connection that has proven the secret."""
    connection = connect(found.addresses[0])
    connection.sock.settimeout(10.0)
    header = Header(FrameKind.HELLO, incarnation=CLIENT)
    authenticate(connection, SECRET, "coordinator", header)
    return connection


def read_to_end(sock: socket.socket) -> None:
    with suppress(ConnectionResetError):
        while sock.recv(1 << 16):
            pass


def test_a_wrong_secret_is_refused_on_both_sides() -> None:
    with victim() as found:
        client = RemoteCoordinator(found.addresses[0], new_secret(), "server 1")
        with pytest.raises(AuthenticationError, match="does not prove the secret"):
            client.get("chain/0")
        client.close()


def test_a_connection_of_a_worker_is_refused() -> None:
    with victim() as found:
        connection = connect(found.addresses[0])
        authenticate(connection, SECRET, "push", Header(FrameKind.HELLO, incarnation=CLIENT))
        connection.sock.settimeout(10.0)
        assert connection.receive(1 << 12)[0].kind is FrameKind.ERROR
        connection.close()


def put(**change: object) -> bytes:
    fields = {"type": "PutIf", "key": "x", "value": b"", "version": 0, **change}
    return msgspec.msgpack.encode(fields)


REQUESTS: dict[str, bytes] = {
    "a key of a megabyte": put(key="x" * 90_000),
    "a version beyond 63 bits": put(version=2**64 - 1),
    "a version that is text": put(version="0"),
    "a negative lease": put(lease_id=-1),
    "a field too many": put(more=1),
    "a lease for ever": msgspec.msgpack.encode({"type": "Grant", "ttl_s": 1e300, "holder": ""}),
    "a watch for ever": msgspec.msgpack.encode(
        {"type": "Watch", "name": "", "after_revision": 0, "timeout_s": 1e9}
    ),
    "an unknown request": msgspec.msgpack.encode({"type": "Exec", "key": "x"}),
    "no request": b"",
    "lists in lists": b"\x91" * 60_000,
    "a map of 2**32 entries": b"\xdf\xff\xff\xff\xff",
    "4 GB of bytes": b"\xc6\xff\xff\xff\xff",
    "text that is no UTF-8": put(key="xx").replace(b"xx", b"\xff\xfe"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_client_that_means_harm_is_refused(name: str) -> None:
    with victim() as found:
        connection = member(found)
        header = Header(FrameKind.COORDINATE, incarnation=CLIENT, sequence=1)
        connection.sock.sendall(pack(header, REQUESTS[name]))
        assert connection.receive(1 << 16)[0].kind is FrameKind.ERROR
        read_to_end(connection.sock)
        assert found.refused.total() == 1
        connection.close()


@pytest.mark.parametrize(
    "change",
    [
        {"kind": FrameKind.PULL},
        {"payload_bytes": 2**40},
        {"incarnation": CLIENT + 1},
        {"sequence": 2**64 - 1},
        {"argument": 2**63},
    ],
)
def test_a_frame_that_is_none_of_this_client_is_refused(change: dict[str, Any]) -> None:
    with victim() as found:
        connection = member(found)
        header = Header(FrameKind.COORDINATE, incarnation=CLIENT)._replace(**change)
        connection.sock.sendall(pack(header, encode(List("chain/0"))))
        assert connection.receive(1 << 16)[0].kind is FrameKind.ERROR
        connection.close()


def test_random_and_damaged_requests(whole_suite: bool) -> None:
    chance = random.Random(1)
    valid = [encode(List("chain/0")), put(version=77), REQUESTS["a watch for ever"]]
    with victim() as found:
        for _ in range(400 if whole_suite else 30):
            data = bytearray(chance.choice(valid))
            for _ in range(chance.randrange(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            header = Header(FrameKind.COORDINATE, incarnation=CLIENT, sequence=1)
            frame = bytearray(pack(header, bytes(data)))
            if chance.random() < 0.5:
                frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
            with suppress(ShoalError, OSError):
                connection = member(found)
                connection.sock.sendall(frame)
                connection.sock.shutdown(socket.SHUT_WR)
                read_to_end(connection.sock)
                connection.close()


def test_a_client_that_takes_no_answers_delays_no_other() -> None:
    with victim() as found:
        connection = member(found)
        connection.sock.settimeout(0.2)
        frame = pack(
            Header(FrameKind.COORDINATE, incarnation=CLIENT, sequence=1), encode(List("chain/0"))
        )
        with suppress(TimeoutError):
            for _ in range(20_000):
                connection.sock.sendall(frame)
        with RemoteCoordinator(found.addresses[0], SECRET) as other:
            assert other.get("none") is None
        connection.close()
