"""Short requests to several servers at once: answers, and what happens without one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from shoal.embedding.spec import TableSpec
from shoal.errors import PeerLost, ShoalError
from shoal.server import exchange
from shoal.server.client import Client
from shoal.server.consistency import Rule
from shoal.server.handlers import dispatch
from shoal.server.protocol.frames import FrameKind, Header, Refused, encode, pack
from shoal.server.protocol.row_messages import HeatRequest
from shoal.server.request import Request
from shoal.server.row_client import ServerStore
from tests.server.helpers import client_of, servers

if exchange._native is None:
    pytest.skip("the native part is not built", allow_module_level=True)

native = exchange._native
OK = pack(Header(FrameKind.OK), b"meta")
SPEC = TableSpec("t", 40, 2, placement="range")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def answer_to(ours: socket.socket) -> bytes | int:
    return native.receive([ours.fileno()], np.zeros(1, np.int64))[0]


def test_a_request_of_several_buffers_is_sent_whole(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    body = bytes(3 << 20)  # more than a socket holds
    received = bytearray()

    def read() -> None:
        while len(received) < len(body) + 6:
            received.extend(theirs.recv(1 << 20))

    thread = threading.Thread(target=read)
    thread.start()
    assert native.send([(ours.fileno(), b"abc", b"", body, b"def")]) == [0]
    thread.join()
    assert received == b"abc" + body + b"def"


@pytest.mark.parametrize("length", [0, 100, 9000])
def test_an_answer_is_read_in_pieces(
    pair: tuple[socket.socket, socket.socket], length: int
) -> None:
    ours, theirs = pair
    whole = pack(Header(FrameKind.OK), bytes(length))
    pieces = [whole[:10], whole[10:70], whole[70:5000], whole[5000:]]
    thread = threading.Thread(target=lambda: [theirs.sendall(each) for each in pieces])
    thread.start()
    assert answer_to(ours) == whole
    thread.join()


@pytest.mark.parametrize(
    "bad",
    [
        pack(Header(FrameKind.OK), b"", payload_bytes=1),
        pack(Header(FrameKind.OK)) + b"more",
        OK[:56] + (1 << 21).to_bytes(4, "little") + OK[60:],
    ],
)
def test_an_answer_with_a_payload_or_too_long_is_refused(
    pair: tuple[socket.socket, socket.socket], bad: bytes
) -> None:
    ours, theirs = pair
    theirs.sendall(bad)
    assert isinstance(answer_to(ours), int)


def test_a_closed_connection_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(OK[:20])
    theirs.close()
    assert isinstance(answer_to(ours), int)
    assert native.send([(ours.fileno(), b"abc")])[0] > 0


@pytest.mark.parametrize("request_", [(), (1,), (1, b"", b"", b"", b"", b""), [1, b""]])
def test_what_is_no_request_is_refused(request_: object) -> None:
    with pytest.raises(TypeError):
        native.send([request_])  # type: ignore[list-item]


# ------------------------------------------------------------------------------ with servers


IDS = torch.tensor([3, 39, 12, 21])


def store_of(client: Client) -> ServerStore:
    store = ServerStore(client)
    store.create(SPEC)
    return store


def test_rows_are_the_same_with_and_without_the_native_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with servers(3) as found:
        client = client_of(found, 0, Rule(1))
        store = store_of(client)
        rows = store.pull("t", IDS)
        assert torch.equal(rows, SPEC.initial(IDS))
        monkeypatch.setattr(exchange, "_native", None)
        assert torch.equal(store.pull("t", IDS), rows)
        client.close()


def test_a_refusal_of_one_server_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(peer: object, header: object, meta: bytes) -> None:
        raise Refused("no rows today")

    with servers(3) as found:
        client = client_of(found, 0, Rule(1))
        store = store_of(client)
        registered = dispatch.HANDLERS[FrameKind.TABLE_PULL]._replace(handler=refuse)
        monkeypatch.setitem(dispatch.HANDLERS, FrameKind.TABLE_PULL, registered)
        with pytest.raises(ShoalError, match="no rows today"):
            store.pull("t", IDS)
        client.close()


def test_the_server_that_is_lost_is_named() -> None:
    with servers(3) as found:
        client = client_of(found, 0, Rule(1))
        store = store_of(client)
        store.pull("t", IDS)
        found[1].close()
        with pytest.raises(PeerLost, match="TABLE_PULL to server 1"):
            store.pull("t", IDS)
        with pytest.raises(PeerLost):
            store.pull("t", IDS)
        client.close()


def test_an_exchange_that_is_abandoned_leaves_its_queues() -> None:
    with servers(2) as found:
        client = client_of(found, 0, Rule(1))
        store_of(client)
        link = client.links[0]
        request = Request(FrameKind.TABLE_HEAT, encode(HeatRequest("t")))
        begun = exchange.begin([(link, request)], "rows")
        assert begun is not None and exchange.begin([(link, request)], "rows") is None
        begun.abandon(KeyboardInterrupt())
        begun.abandon(KeyboardInterrupt())
        assert link.take("rows") is not None
        client.close()
