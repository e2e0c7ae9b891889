"""Who may connect, and what a frame that does not fit, a late or a lost peer lead to."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from shoal.comm.executors.scheduled import Scheduled
from shoal.comm.group import Group
from shoal.comm.select import exchange_over
from shoal.comm.transport.tcp.connect import Exchange, StreamName, TcpSpec, accept, prove
from shoal.comm.transport.tcp.transport import TcpEngine, TcpTransport, is_built
from shoal.errors import BadInput, PeerLost, ShoalError
from shoal.runtime.acceptor import Acceptor
from shoal.runtime.config import TlsConfig
from shoal.runtime.secret import Stranger
from shoal.schedules.collectives.cost import Link
from tests.comm.threads import KEY, Table, on_ranks, on_tcp
from tests.comm.torch_ranks import forked_ranks
from tests.server.test_tls import certificate, needs_openssl

pytestmark = pytest.mark.skipif(not is_built(), reason="the native part is not built")


def swap(transport: TcpTransport) -> float:
    """A small and a large message to the other of two ranks; the sum of what came."""
    peer = 1 - transport.rank
    total = 0.0
    for numel in (3, 50_000):
        into = torch.empty(numel)
        arrives = transport.recv(into, peer, 1)
        transport.send(torch.full((numel,), float(transport.rank + 1)), peer, 1).wait()
        arrives.wait()
        total += float(into[-1])
    return total


def assert_swapped(first: Exchange, second: Exchange, strangers: list[socket.socket]) -> None:
    """Two ranks that meet in these ways exchange numbers, whatever the strangers do."""

    def main(rank: int) -> float:
        engine = TcpEngine(TcpSpec(rank, 2, KEY), second if rank else first)
        with closing(engine):
            return swap(TcpTransport(engine))

    assert on_ranks(2, main) == [4.0, 2.0]
    for sock in strangers:
        sock.close()


def with_strangers(meet: Exchange, strangers: list[socket.socket], *said: bytes) -> Exchange:
    """A rank at whose address strangers say this before others know it."""

    def exchange(address: bytes) -> list[bytes]:
        host, port = address.decode().split()[:2]
        for words in said:
            strangers.append(socket.create_connection((host, int(port))))
            strangers[-1].sendall(words)
        return meet(address)

    return exchange


def test_strangers_that_say_nothing_or_nonsense_hold_up_no_rank() -> None:
    meeting = Table(2)
    strangers: list[socket.socket] = []
    said = (b"", b"GET / HTTP/1.1\r\n\r\n" * 8, b"\0" * 4096)
    ranks = [with_strangers(meeting.exchange(rank), strangers, *said) for rank in range(2)]
    assert_swapped(*ranks, strangers)


def test_strangers_in_all_places_for_handshakes_do_not_keep_a_rank_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.comm.transport.tcp.connect._MOST_HANDSHAKES", 4)
    monkeypatch.setattr("shoal.comm.transport.tcp.connect.GRACE_S", 0.02)
    meeting = Table(2)
    strangers: list[socket.socket] = []
    first = with_strangers(meeting.exchange(0), strangers, *[b""] * 20)
    assert_swapped(first, meeting.exchange(1), strangers)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED])
def test_ranks_connect_when_accepting_has_failed(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is closed where there are no descriptors is tried again."""
    errors = [OSError(number, "injected") for _ in range(3)]
    accept_one = Acceptor.accept_now

    def failing(acceptor: Acceptor, make_room: Callable[[], bool]) -> socket.socket | None:
        with pytest.MonkeyPatch.context() as patch:
            if errors:
                patch.setattr(acceptor, "sock", Mock(wraps=acceptor.sock))
                patch.setattr(acceptor.sock, "accept", Mock(side_effect=errors.pop()))
            return accept_one(acceptor, make_room)

    monkeypatch.setattr(Acceptor, "accept_now", failing)
    meeting = Table(2)
    assert_swapped(meeting.exchange(0), meeting.exchange(1), [])
    assert errors == []


def refusals_of(*specs: TcpSpec) -> dict[int, ShoalError]:
    """What each of two ranks raises that cannot connect."""
    meeting = Table(2)

    def main(rank: int) -> ShoalError:
        with pytest.raises(ShoalError) as raised:
            TcpEngine(specs[rank], meeting.exchange(rank))
        return raised.value

    return dict(enumerate(on_ranks(2, main)))


def test_a_rank_with_another_key_does_not_get_in() -> None:
    raised = refusals_of(*(TcpSpec(r, 2, bytes([r]) * 32, timeout_s=0.5) for r in range(2)))
    assert str(raised[0]).startswith("rank 0 lost rank 1 after 0.5 s in connecting over TCP")
    assert str(raised[1]).startswith("rank 1 connects to rank 0 at 127.0.0.1:")


def test_a_proof_for_one_stream_does_not_serve_for_another() -> None:
    ours, theirs = socket.socketpair()
    failures: list[Exception] = []

    def answer() -> None:
        try:
            accept(theirs, KEY, b"certificate of the server")
        except Stranger as error:
            failures.append(error)
        theirs.close()

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(Stranger):
        prove(ours, KEY, StreamName(1, 0, 0), b"certificate of a relay")
    thread.join()
    ours.close()
    assert len(failures) == 1


def test_a_frame_that_does_not_fit_ends_the_connection_with_a_sentence() -> None:
    """Rank 1 knows the key and speaks another protocol."""
    meeting = Table(2)
    made: list[socket.socket] = []

    def other() -> None:
        host, port = meeting.exchange(1)(b"127.0.0.1 1")[0].decode().split()[:2]
        for stream in range(2):
            sock = socket.create_connection((host, int(port)))
            prove(sock, KEY, StreamName(1, 0, stream))
            made.append(sock)
        made[0].sendall(b"\xff" * 256)

    thread = threading.Thread(target=other)
    thread.start()
    engine = TcpEngine(TcpSpec(0, 2, KEY, streams=2), meeting.exchange(0))
    with pytest.raises(PeerLost, match=r"rank 0 lost rank 1 in recv from 1, tag 5 .*protocol"):
        TcpTransport(engine).recv(torch.zeros(1), 1, 5).wait()
    thread.join()
    engine.close()
    for sock in made:
        sock.close()


def test_a_rank_that_leaves_a_group_wakes_the_others_and_what_it_sent_arrives() -> None:
    def body(transport: TcpTransport) -> Any:
        group = TcpTransport(transport.engine, None, "group", 20.0)
        if transport.rank:
            group.send(torch.ones(1), 0, 1).wait()
            group.abort()
            return swap(transport)
        with pytest.raises(PeerLost):
            group.recv(torch.zeros(1), 1, 2).wait()
        into = torch.zeros(1)
        group.recv(into, 1, 1).wait()
        return swap(transport) + float(into)

    assert on_tcp(2, body) == [5.0, 2.0]


def test_messages_go_through_mutual_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "rank", "IP:127.0.0.1")
    tls = TlsConfig(str(cert), str(key), str(cert))
    assert on_tcp(2, swap, tls=tls) == [4.0, 2.0]


@needs_openssl
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("rank 1 has none", "rank 0 has files of TLS and rank 1 has not: give SHOAL_TLS_CERT"),
        ("of another authority", "SHOAL_TLS_CA of rank 1 does not vouch .*self.signed cert"),
        ("of another host", "SHOAL_TLS_CA of rank 1 does not vouch .*IP address mismatch"),
    ],
)
def test_files_of_tls_that_do_not_serve_end_all_ranks_with_one_sentence(
    case: str, said: str, tmp_path: Path
) -> None:
    cert, key = certificate(tmp_path, "rank")
    other, its_key = certificate(tmp_path, "other", "IP:10.0.0.1")
    second = {
        "rank 1 has none": TlsConfig(),
        "of another authority": TlsConfig(str(other), str(its_key), str(cert)),
        "of another host": TlsConfig(str(other), str(its_key), str(other)),
    }[case]
    first = TlsConfig(str(cert), str(key), str(cert))
    raised = refusals_of(*(TcpSpec(r, 2, KEY, tls=t) for r, t in enumerate((first, second))))
    for rank, error in raised.items():
        assert isinstance(error, BadInput)
        assert re.match(f"rank {rank}: {said}", str(error)), error
        assert "`shoal keys tls`" in str(error)
    assert len(raised) == 2


# ------------------------------------------------------------------ killed or stopped peers


LARGE = 4_000_000


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
    operation: Callable[[TcpTransport], None], doing: str, tmp_path: Path
) -> None:
    def main(rank: int) -> str:
        exchange = exchange_over(dist.FileStore(f"{tmp_path}/store", 2), rank, 2)
        transport = TcpTransport(TcpEngine(TcpSpec(rank, 2, KEY), exchange), timeout_s=20.0)
        pid = torch.tensor([os.getpid()])
        if rank:
            transport.send(pid, 0, 1).wait()
            signal.pause()
        transport.recv(pid, 1, 1).wait()
        os.kill(int(pid), signal.SIGSTOP)
        transport.timeout_s = 0.3
        with pytest.raises(PeerLost, match=rf"rank 0 lost rank 1 after 0.3 s in {doing}"):
            operation(transport)
        transport.timeout_s = 20.0
        os.kill(int(pid), signal.SIGKILL)
        with pytest.raises(PeerLost, match=rf"rank 0 lost rank 1 in {doing}"):
            operation(transport)
        return "both were told"

    assert forked_ranks(main, 2) == ["both were told", None]
