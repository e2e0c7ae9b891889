"""Hostile bytes at the socket of a coordinator: refused, counted; others are served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import msgspec
import pytest

from shoal.server.coordinator import List
from shoal.server.coordinator.client import RemoteCoordinator
from shoal.server.coordinator.service import CoordinatorService
from shoal.server.protocol import Channel, FrameKind, Header, encode, pack
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.endpoint import connect
from shoal.server.protocol.handshake import authenticate
from tests.processes import resident_mb
from tests.server.coordinator.helpers import SECRET, service

CLIENT = 99


HEADER = Header(FrameKind.COORDINATE, incarnation=CLIENT, sequence=1)


@pytest.fixture
def victim() -> Iterator[CoordinatorService]:
    """A coordinator with one honest client, which is served at the end as at the start."""
    with service() as found, RemoteCoordinator(found.addresses[0], SECRET) as honest:
        before = honest.put_if("chain/0", b"honest", 0)
        memory_mb = resident_mb()
        yield found
        assert resident_mb() - memory_mb < 50
        assert honest.list("").entries == {"chain/0": before}
        assert honest.put_if("chain/0", b"after", before.version).version == before.version + 1


@contextmanager
def member(victim: CoordinatorService, channel: Channel = "coordinator") -> Iterator[Connection]:
    """A connection that has proven the secret."""
    with closing(connect(victim.addresses[0])) as connection:
        connection.sock.settimeout(10.0)
        header = Header(FrameKind.HELLO, incarnation=CLIENT)
        authenticate(connection, SECRET, channel, header)
        yield connection


def test_a_connection_of_a_worker_is_refused(victim: CoordinatorService) -> None:
    with member(victim, "push") as connection:
        assert connection.receive(1 << 12)[0].kind is FrameKind.ERROR


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
    "an unknown request": msgspec.msgpack.encode({"type": "Exec", "key": "x"}),
    "no request": b"",
    "lists in lists": b"\x91" * 60_000,
    "a map of 2**32 entries": b"\xdf\xff\xff\xff\xff",
    "4 GB of bytes": b"\xc6\xff\xff\xff\xff",
    "text that is no UTF-8": put(key="xx").replace(b"xx", b"\xff\xfe"),
}


CHANGES: list[dict[str, Any]] = [
    {"kind": FrameKind.PULL},
    {"payload_bytes": 2**40},
    {"incarnation": CLIENT + 1},
    {"sequence": 2**64 - 1},
    {"argument": 2**63},
]
FRAMES = {name: pack(HEADER, request) for name, request in REQUESTS.items()}
for change in CHANGES:
    FRAMES[f"{change}"] = pack(HEADER._replace(**change), encode(List("chain/0")))


@pytest.mark.parametrize("name", FRAMES)
def test_a_client_that_means_harm_is_refused(victim: CoordinatorService, name: str) -> None:
    with member(victim) as connection:
        connection.sock.sendall(FRAMES[name])
        assert connection.receive(1 << 16)[0].kind is FrameKind.ERROR
        with suppress(ConnectionResetError):
            while connection.sock.recv(1 << 16):
                pass
    assert victim.refused.total() == 1


def test_a_client_that_takes_no_answers_delays_no_other(victim: CoordinatorService) -> None:
    with member(victim) as connection:
        connection.sock.settimeout(0.2)
        with suppress(TimeoutError):
            for _ in range(20_000):
                connection.sock.sendall(pack(HEADER, encode(List("chain/0"))))
        with RemoteCoordinator(victim.addresses[0], SECRET) as other:
            assert other.get("none") is None
