"""Hostile bytes: the server answers or closes, counts them, and serves the other workers."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import torch

from shoal.comm.transport.shm import memfd
from shoal.runtime.secret import CODE_BYTES, NONCE_BYTES, Greeting, fresh_nonce, new_secret
from shoal.server import shared_memory as segment
from shoal.server.client.client import Client
from shoal.server.consistency import Rule
from shoal.server.embedding.spec import RowOptimizer, TableSpec
from shoal.server.messages import Commit, Pull
from shoal.server.process.server import Server
from shoal.server.protocol import (
    HEADER_BYTES,
    Challenge,
    Channel,
    FrameKind,
    Header,
    Hello,
    Refused,
    encode,
    pack,
    unpack,
    verify,
)
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.endpoint import connect
from shoal.server.protocol.handshake import AuthenticationError, authenticate, claim_of
from shoal.server.protocol.service import MAX_REASONS
from shoal.server.rows.client import ServerStore
from tests.processes import resident_mb
from tests.products import few_or_all
from tests.server.coordinator.helpers import until
from tests.server.helpers import MODEL, SECRET, client_of, fill, servers, weights

ASYNC = Rule(2, asynchronous=True)
TABLE = TableSpec("t", 10, 4, optimizer=RowOptimizer("sgd", 0.1))
NO_UTF8 = b"\x82\xa5table\xa2\xff\xfe\xa5count\x01"


@contextmanager
def victim() -> Iterator[tuple[Server, Client]]:
    """A server with one honest worker, which is served at the end as at the start."""
    with servers() as found:
        client = client_of(found, 0, ASYNC)
        table = ServerStore(client).create(TABLE)
        before = weights(client)
        rows = table.pull(torch.arange(10))
        start_mb = resident_mb()
        yield found[0], client
        assert resident_mb() - start_mb < 50
        assert torch.equal(weights(client), before)
        assert torch.equal(table.pull(torch.arange(10)), rows)
        assert client.commit(*fill(client, 1.0)).verdict == "admitted"
        assert torch.any(weights(client) == -1.0)
        client.leave()


def stranger(server: Server) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(server.address.removeprefix("unix:"))
    sock.settimeout(10.0)
    return sock


def is_closed_by_server(sock: socket.socket) -> bool:
    """Reads to the end; whatever the server says comes before it."""
    with suppress(ConnectionResetError):
        while sock.recv(1 << 16):
            pass
    return True


def member(server: Server, channel: Channel, worker: int = 1) -> tuple[Connection, Header]:
    """A connection that has proven the secret, of a worker that has joined."""
    connection = connect(server.address)
    header = Header(FrameKind.HELLO, worker, MODEL, 99)
    authenticate(connection, SECRET, channel, header)
    return connection, header


def joined(
    server: Server, client: Client, channel: Channel
) -> tuple[Connection, Connection, Header]:
    """Control and another connection of worker 1, whose gradients go over the wire."""
    control, header = member(server, "control")
    control.send(header._replace(kind=FrameKind.SETUP), encode(client.specs[0]))
    assert control.receive(1 << 10)[0].kind is FrameKind.OK
    other, _ = member(server, channel)
    return control, other, header


def assert_refused(connection: Connection, closes: bool = True) -> None:
    connection.sock.settimeout(10.0)
    assert connection.receive(1 << 16)[0].kind is FrameKind.ERROR
    assert not closes or is_closed_by_server(connection.sock)
    connection.close()


def refused(server: Server) -> int:
    return sum(server.refused.values())


def wait_refused(server: Server, count: int) -> None:
    until(lambda: refused(server) >= count, "the server counts it")


# ---- before the secret is proven ----------------------------------------------------------------


def test_a_wrong_secret_is_refused() -> None:
    with (
        victim() as (server, _),
        pytest.raises(AuthenticationError, match="does not prove the secret"),
    ):
        client_of([server], 1, ASYNC, secret=new_secret())


def test_a_server_without_the_secret_is_refused() -> None:
    """The worker asks for a proof as well."""
    ours, theirs = socket.socketpair()
    with Connection(ours).sock, theirs:
        fake = Connection(theirs)
        worker = Connection(ours)
        fake.send(Header(FrameKind.CHALLENGE), encode(Challenge(fresh_nonce())))
        fake.send(Header(FrameKind.WELCOME), msgspec.msgpack.encode({"code": bytes(32)}))
        with pytest.raises(AuthenticationError, match="does not know the secret"):
            authenticate(worker, SECRET, "control", Header(FrameKind.HELLO))


def _hello(at: int, form: str, size: int) -> bytes:
    """A hello whose header says another length."""
    frame = bytearray(pack(Header(FrameKind.HELLO, 1, MODEL)))
    struct.pack_into(form, frame, at, size)
    return bytes(frame)


def test_strangers_are_refused_whatever_they_send() -> None:
    fields = {"nonce": fresh_nonce(), "channel": "control", "proof": fresh_nonce()}
    no_text = msgspec.msgpack.encode(fields).replace(b"control", b"contr\xff\xfe")
    with victim() as (server, client):
        spec = encode(client.specs[0])[:400]
        said = [pack(Header(kind, 0, MODEL), spec) for kind in FrameKind]  # HELLO of no form, too
        said += [_hello(48, "<Q", size) for size in (2**63, 2**64 - 1, 1 << 31)]  # payload
        said += [_hello(56, "<I", size) for size in (2**32 - 1, 1 << 31)]  # metadata
        said += [b"GET / HTTP/1.1\r\n" + bytes(100)]
        said += [pack(Header(FrameKind.HELLO, 1, MODEL), no_text)]
        for data in said:
            with stranger(server) as sock:
                sock.sendall(data)
                assert is_closed_by_server(sock)
        wait_refused(server, len(said))
        assert refused(server) == len(said)
        assert server.refused["not a frame of Shoal"] == 1
        assert any(reason.startswith("metadata is not a valid Hello") for reason in server.refused)
        for end in range(0, len(said[0]), 5):
            with stranger(server) as sock:
                sock.sendall(said[0][:end])


def test_a_replayed_hello_is_refused() -> None:
    with victim() as (server, _):
        header = Header(FrameKind.HELLO, 1, MODEL, 5)
        connection = connect(server.address)
        _, meta = connection.receive(512)
        nonce = msgspec.msgpack.decode(meta, type=Challenge).nonce
        said = Greeting(SECRET).hello(nonce, claim_of("control", header))
        frame = pack(header, encode(Hello(said[:NONCE_BYTES], "control", said[-CODE_BYTES:])))
        connection.sock.sendall(frame)
        assert connection.receive(512)[0].kind is FrameKind.WELCOME
        with stranger(server) as sock:
            sock.sendall(frame)  # as recorded
            assert is_closed_by_server(sock)
        assert server.refused["HELLO does not prove the secret"] == 1
        connection.close()


# ---- from a worker that knows the secret --------------------------------------------------------


def _state(**change: object) -> bytes:
    value = {"slice": 0, "key": "exp_avg", "dtype": "float32", "shape": [5, 3], **change}
    return msgspec.msgpack.encode({"steps": 0, "tensors": [value]})


def _rows(table: str, ids: list[int], grads: int = 0, **change: int) -> tuple[bytes, bytes]:
    """Metadata and payload of a request for rows."""
    meta = msgspec.msgpack.encode({"table": table, "count": len(ids), "lr": 0.1, **change})
    return meta, struct.pack(f"<{len(ids)}q", *ids) + bytes(4 * grads)


COMMIT, PULL = encode(Commit(0, 0, 1.0)), encode(Pull(None, 0))
NEGATIVE = msgspec.msgpack.encode({"step": -1, "version": 0, "batch_fraction": 1.0})
MORE = msgspec.msgpack.encode({"step": None, "version": 0, "more": 1})
ATTACKS: dict[str, tuple[Channel, FrameKind, bytes, dict[str, int], bytes]] = {
    name: (channel, kind, meta, fields, b"")
    for name, channel, kind, meta, fields in [
        ("gradients beyond the slice", "push", FrameKind.BUCKET, b"", {"payload_bytes": 400}),
        ("an offset", "push", FrameKind.BUCKET, b"", {"payload_bytes": 4, "argument": 2**63}),
        ("half an element", "push", FrameKind.BUCKET, b"", {"payload_bytes": 3}),
        ("2**63 bytes of gradients", "push", FrameKind.BUCKET, b"", {"payload_bytes": 2**63}),
        ("a future push", "push", FrameKind.BUCKET, b"", {"payload_bytes": 4, "sequence": 9}),
        ("a head that is too long", "push", FrameKind.COMMIT, COMMIT, {"payload_bytes": 10**9}),
        ("a commit of no form", "push", FrameKind.COMMIT, b"\xc1" * 9, {"payload_bytes": 12}),
        ("a negative step", "push", FrameKind.COMMIT, NEGATIVE, {"payload_bytes": 12}),
        ("another worker's name", "pull", FrameKind.PULL, PULL, {"worker": 0}),
        ("another incarnation", "pull", FrameKind.PULL, PULL, {"incarnation": 3}),
        ("another model", "pull", FrameKind.PULL, PULL, {"model": 8}),
        ("another epoch", "pull", FrameKind.PULL, PULL, {"epoch": 1}),
        ("a push where one pulls", "pull", FrameKind.COMMIT, COMMIT, {}),
        ("a payload where none belongs", "pull", FrameKind.PULL, PULL, {"payload_bytes": 2**40}),
        ("a field too many", "pull", FrameKind.PULL, MORE, {}),
        ("lists in lists in lists", "pull", FrameKind.PULL, b"\x91" * 60_000, {}),
        ("text that is no UTF-8", "rows", FrameKind.TABLE_PULL, NO_UTF8, {}),
        ("a field's name that is no UTF-8", "pull", FrameKind.PULL, b"\x81\xa2\xff\xff\x00", {}),
        ("rows without memory", "rows", FrameKind.SHARE_ROWS, b"\x81\xa6number\x00", {}),
        ("half a table", "rows", FrameKind.TABLE_MAKE, b"\x81\xa4name\xa1x", {}),
    ]
}
ATTACKS |= {
    name: ("pull", FrameKind.STATE_SET, _state(**change), {"payload_bytes": payload}, b"")
    for name, change, payload in [
        ("state of 2**60 elements", {"shape": [2**20, 2**20, 2**20]}, 16),
        ("an element count that overflows", {"shape": [2**62, 2**62, 2**62, 16]}, 0),
        ("state of a negative shape", {"shape": [-5, -3]}, 60),
        ("state of a parameter that is not here", {"slice": 77}, 60),
        ("a dtype that is no number", {"dtype": "object"}, 60),
        ("bytes that are not what the state says", {}, 8),
    ]
}
ATTACKS |= {
    f"{kind.name} of {name}": (channel, kind, meta, {"payload_bytes": len(payload)}, payload)
    for name, channel, kind, (meta, payload) in [
        ("row -1", "rows", FrameKind.TABLE_PULL, _rows("t", [-1])),
        ("row 10 of 10", "rows", FrameKind.TABLE_PULL, _rows("t", [10])),
        ("row 2**62", "rows", FrameKind.TABLE_PULL, _rows("t", [2**62])),
        ("no table", "rows", FrameKind.TABLE_PULL, _rows("u", [1])),
        ("2**61 rows", "rows", FrameKind.TABLE_PULL, _rows("t", [1], count=2**61)),
        ("-1 rows", "rows", FrameKind.TABLE_PULL, _rows("t", [1], count=-1)),
        ("no memory", "rows", FrameKind.TABLE_PULL, _rows("t", [1, 0], count=1, memory=0)),
        ("row -3", "push", FrameKind.TABLE_PUSH, _rows("t", [-3], 4)),
        ("row 11 of 10", "push", FrameKind.TABLE_PUSH, _rows("t", [11], 4)),
        ("too few gradients", "push", FrameKind.TABLE_PUSH, _rows("t", [1, 2], 4)),
        ("2**60 rows", "push", FrameKind.TABLE_PUSH, _rows("t", [1], 4, count=2**60)),
        ("no chunk", "rows", FrameKind.TABLE_SET, _rows("t", [1], 4)),
    ]
}


def attack_of(name: str, header: Header) -> bytes:
    _, kind, meta, fields, payload = ATTACKS[name]
    return pack(header._replace(**{"kind": kind, "sequence": 1, **fields}), meta) + payload


@pytest.mark.parametrize("name", ATTACKS)
def test_a_worker_that_means_harm_is_refused(name: str) -> None:
    with victim() as (server, client):
        control, connection, header = joined(server, client, ATTACKS[name][0])
        connection.sock.sendall(attack_of(name, header))
        assert_refused(connection)
        assert refused(server) == 1
        control.close()


@pytest.mark.parametrize(
    "change",
    [
        {"size": 2**60, "stop": 2**60},
        {"start": 2**61},
        {"stop": 2**61},
        {"dtype": "object"},
        {"optimizer": {"name": "LBFGS", "options": {}}},
        {"optimizer": {"name": "__class__", "options": {}}},
        {"optimizer": {"name": "SGD", "options": {"lr": -1.0}}},
        {"optimizer": {"name": "SGD", "options": {"nonsense": 1.0}}},
        {"optimizer": {"name": "SGD", "options": {"lr": "0.1"}}},
        {"microbatches": 3},
        {"rule": {"workers": 2**40}},
        {"parameters": 2**40},
        {"slices": [{"parameter": 0, "start": 0, "first_row": 0, "shape": [2**40]}]},
        {"slices": [{"parameter": 9, "start": 16, "first_row": 0, "shape": [1]}]},
        {"slices": [{"parameter": 0, "start": -16, "first_row": 0, "shape": [1]}]},
        {"split": {"shard": 2, "shards": 2}},
        {"split": {"shards": 0}},
        {"split": {"shard": 1, "shards": 2, "leader_model": MODEL}},  # it would be the leader
        {"index": 1, "servers": 2},  # it would follow itself
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_model_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    with victim() as (server, client):
        connection = connect(server.address)
        header = Header(FrameKind.HELLO, 0, MODEL + 1, 4)
        authenticate(connection, SECRET, "control", header)
        spec = {**msgspec.to_builtins(client.specs[0]), **change}
        connection.send(header._replace(kind=FrameKind.SETUP), msgspec.msgpack.encode(spec))
        assert_refused(connection, closes=False)
        assert MODEL + 1 not in server.models


def test_memory_that_is_not_sealed_or_of_another_size_is_refused(tmp_path: Path) -> None:
    with victim() as (server, client):
        spec = client.specs[0]
        right = segment.segment_bytes(client.dtype, spec.size, 1)
        for name, size in {"unsealed": right, "short": right - 4, "file": right}.items():
            if name == "file":
                handle = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
            else:
                handle = os.memfd_create(name, os.MFD_ALLOW_SEALING)
            os.ftruncate(handle, size)
            connection, header = member(server, "control")
            setup = header._replace(kind=FrameKind.SETUP)
            connection.send(setup, encode(spec), descriptor=handle)
            assert_refused(connection, closes=False)
            os.close(handle)


@pytest.mark.parametrize("wrong", ["none", "another", "short", "asynchronous"])
def test_memory_for_weights_that_others_do_not_share_is_refused(wrong: str) -> None:
    """Nor may workers read it that do so while servers write."""
    is_asynchronous = wrong == "asynchronous"
    with servers() as found:
        client = client_of(found, 0, Rule(2, asynchronous=is_asynchronous))
        assert is_asynchronous or client.share_weights(lambda word: [word])
        control, _, header = joined(found[0], client, "pull")
        handle = memfd.make("weights", client.size * 4 - (4 if wrong == "short" else 0))
        passed = None if wrong == "none" else handle
        control.send(header._replace(kind=FrameKind.SHARE_WEIGHTS), b"", descriptor=passed)
        assert_refused(control, closes=False)
        os.close(handle)


def test_descriptors_do_not_pile_up() -> None:
    with victim() as (server, client):
        control, connection, header = joined(server, client, "pull")
        open_before = len(os.listdir("/proc/self/fd"))
        handle = os.memfd_create("many")
        for _ in range(100):
            meta = encode(Pull(None, 0))
            connection.send(header._replace(kind=FrameKind.PULL), meta, descriptor=handle)
            answer, _ = connection.receive(1 << 16)
            connection.read_into(memoryview(bytearray(answer.payload_bytes)))
        os.close(handle)
        assert len(os.listdir("/proc/self/fd")) <= open_before + 1
        connection.close()
        control.close()


# ---- bit flips ----------------------------------------------------------------------------------


def damaged(frame: bytes, chance: random.Random) -> bytes:
    """The frame with one to eight bits flipped."""
    return flipped(frame, chance.sample(range(8 * len(frame)), chance.randint(1, 8)))


def flipped(frame: bytes, bits: Iterable[int]) -> bytes:
    copy = bytearray(frame)
    for bit in bits:
        copy[bit // 8] ^= 1 << bit % 8
    return bytes(copy)


def test_a_flipped_bit_in_header_or_metadata_is_noticed() -> None:
    """Every single bit of a frame, and 10,000 times several of them."""
    meta = encode(Commit(3, 2, 0.25, 0.1))
    frame = pack(Header(FrameKind.COMMIT, 1, MODEL, 99, 4, 0, 12), meta)
    chance = random.Random(0)
    cases = [flipped(frame, [bit]) for bit in range(8 * len(frame))]
    for data in cases + [damaged(frame, chance) for _ in range(10_000)]:
        with pytest.raises(Refused):
            header = unpack(data)
            if header.meta_bytes != len(meta):
                raise Refused("another length")
            verify(data[:HEADER_BYTES], data[HEADER_BYTES:], header)


def test_a_server_survives_thousands_of_damaged_conversations() -> None:
    """A connection each: a hello, or what a worker says after it, with some bits flipped."""
    count = few_or_all(2_000, 10_000)
    with victim() as (server, client):
        chance = random.Random(1)
        header = Header(FrameKind.HELLO, 1, MODEL, 99)
        frames = [
            pack(header, encode(Hello(fresh_nonce(), "control", fresh_nonce()))),
            pack(header._replace(kind=FrameKind.PULL), encode(Pull(None, 0))),
            pack(header._replace(kind=FrameKind.SETUP), encode(client.specs[0])),
            pack(header._replace(kind=FrameKind.BUCKET, sequence=1, payload_bytes=60)),
        ]
        for _ in range(count):
            with stranger(server) as sock:
                sock.sendall(damaged(chance.choice(frames), chance))
                sock.shutdown(socket.SHUT_WR)
                assert is_closed_by_server(sock)
        wait_refused(server, count)
        assert len(server.refused) <= MAX_REASONS + 1, "kinds of refusal, not one for each"


# ---- rows of tables -----------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "places"), [(1, 1), (-1, 1), (2**62, 1), (0, 2**61)])
def test_places_outside_of_the_memory_of_a_worker_are_refused(place: int, places: int) -> None:
    with victim() as (server, client):
        control, connection, header = joined(server, client, "rows")
        descriptor = memfd.make("rows", 4096)
        share = header._replace(kind=FrameKind.SHARE_ROWS)
        connection.send(share, b"\x81\xa6number\x00", descriptor=descriptor)
        os.close(descriptor)
        assert connection.receive(1 << 16)[0].kind is FrameKind.OK
        meta, payload = _rows("t", [1, place], count=1, memory=0, places=places)
        pull = header._replace(kind=FrameKind.TABLE_PULL)
        connection.send(pull, meta, memoryview(payload))
        assert_refused(connection)
        control.close()


@pytest.mark.parametrize("change", [{"num_rows": 2**62}, {"dim": 2**40}, {"num_rows": -1}])
def test_tables_that_are_too_large_are_refused(change: dict[str, int]) -> None:
    with victim() as (server, client):
        control, connection, header = joined(server, client, "rows")
        table = {"name": "u", "num_rows": 10, "dim": 4, **change}
        connection.send(header._replace(kind=FrameKind.TABLE_MAKE), msgspec.msgpack.encode(table))
        assert_refused(connection, closes=False)
        control.close()
