"""Short requests to several servers at once: answers, and what happens without one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from shoal.errors import PeerLost, ShoalError
from shoal.server.client import link as link_module
from shoal.server.client.client import Client
from shoal.server.client.route import Request
from shoal.server.consistency import Rule
from shoal.server.embedding.spec import TableSpec
from shoal.server.messages import RowBatch
from shoal.server.process import peer
from shoal.server.process.server import Server
from shoal.server.protocol import FrameKind, Header, Refused, encode, pack
from shoal.server.rows.client import ServerStore, ServerTable
from tests.server.helpers import client_of, servers

if link_module._native is None:
    pytest.skip("the native part is not built", allow_module_level=True)

native = link_module._native
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


# ------------------------------------------------------------------------------ rows


def rows_answer(rows: np.ndarray[Any, Any]) -> bytes:
    return pack(Header(FrameKind.OK), b"meta", payload_bytes=rows.nbytes) + rows.tobytes()


def test_rows_go_to_their_places_whichever_server_answers_first() -> None:
    first, second = socket.socketpair(), socket.socketpair()
    wanted = np.arange(5 * 300, dtype=np.float32).reshape(5, 300)
    target = np.zeros_like(wanted)
    places = [np.array([4, 0, 1]), np.array([2, 3])]
    whole = rows_answer(wanted[places[0]])

    def answer() -> None:
        second[1].sendall(rows_answer(wanted[places[1]]))
        for start in range(0, len(whole), 1000):
            first[1].sendall(whole[start : start + 1000])

    thread = threading.Thread(target=answer)
    thread.start()
    asked = [(first[0].fileno(), places[0]), (second[0].fileno(), places[1])]
    answers = native.receive_rows(asked, target, 1200, np.zeros(1, np.int64))
    thread.join()
    assert [answer[64:] for answer in answers if isinstance(answer, bytes)] == [b"meta", b"meta"]
    assert np.array_equal(target, wanted)
    for each in (*first, *second):
        each.close()


def test_one_server_that_fails_does_not_stop_the_rows_of_others() -> None:
    first, second = socket.socketpair(), socket.socketpair()
    target = np.zeros((2, 2), np.float32)
    first[1].sendall(rows_answer(np.ones((3, 2), np.float32)))  # one row was asked for
    second[1].sendall(rows_answer(np.ones((1, 2), np.float32)))
    asked = [(first[0].fileno(), np.array([0])), (second[0].fileno(), np.array([1]))]
    answers = native.receive_rows(asked, target, 8, np.zeros(1, np.int64))
    assert isinstance(answers[0], int) and isinstance(answers[1], bytes)
    assert target.tolist() == [[0, 0], [1, 1]]
    for each in (*first, *second):
        each.close()


def test_places_out_of_range_are_refused() -> None:
    with pytest.raises(IndexError):
        native.receive_rows([(0, np.array([2]))], np.zeros((2, 2)), 16, np.zeros(1, np.int64))


# ------------------------------------------------------------------------------ with servers


IDS = torch.tensor([3, 39, 12, 21])


@contextmanager
def table_on(count: int, tcp: bool = False) -> Iterator[tuple[list[Server], Client, ServerTable]]:
    with servers(count, tcp) as found:
        client = client_of(found, 0, Rule(1))
        yield found, client, ServerStore(client).create(SPEC)


@pytest.mark.parametrize("tcp", [False, True])
def test_rows_are_the_same_with_and_without_the_native_call(
    monkeypatch: pytest.MonkeyPatch, tcp: bool
) -> None:
    with table_on(3, tcp) as (_, _, table):
        rows = table.pull(IDS)
        assert torch.equal(rows, SPEC.initial(IDS))
        monkeypatch.setattr(link_module, "_native", None)
        assert torch.equal(table.pull(IDS), rows)


def test_rows_are_asked_for_again_over_another_connection() -> None:
    with table_on(3, tcp=True) as (_, client, table):
        table.pull(IDS)
        broken = client.links[1].connection("rows")
        broken.abort()
        assert torch.equal(table.pull(IDS), SPEC.initial(IDS))
        assert client.links[1].connection("rows") is not broken
        assert torch.equal(table.pull(IDS), SPEC.initial(IDS))


@pytest.mark.parametrize("tcp", [False, True])
def test_a_refusal_of_one_server_is_raised(monkeypatch: pytest.MonkeyPatch, tcp: bool) -> None:
    def refuse(peer: object, header: object, meta: bytes) -> None:
        raise Refused("no rows today")

    with table_on(3, tcp) as (_, _, table):
        registered = peer.HANDLERS[FrameKind.TABLE_PULL]._replace(handler=refuse)
        monkeypatch.setitem(peer.HANDLERS, FrameKind.TABLE_PULL, registered)
        with pytest.raises(ShoalError, match="no rows today"):
            table.pull(IDS)


def test_the_server_that_is_lost_is_named() -> None:
    with table_on(3) as (found, _, table):
        table.pull(IDS)
        found[1].close()
        with pytest.raises(PeerLost, match="TABLE_PULL to server 1"):
            table.pull(IDS)
        with pytest.raises(PeerLost):
            table.pull(IDS)


def test_an_exchange_that_is_abandoned_leaves_its_queues() -> None:
    with table_on(2) as (_, client, _):
        link = client.links[0]
        request = Request(FrameKind.TABLE_HEAT, encode(RowBatch("t", 0)))
        begun = link_module.begin_exchange([(link, request)], "rows")
        assert begun is not None and link_module.begin_exchange([(link, request)], "rows") is None
        begun.abandon(KeyboardInterrupt())
        begun.abandon(KeyboardInterrupt())
        assert link.take("rows") is not None
