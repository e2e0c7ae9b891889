"""The store of a rendezvous, for ranks with the key alone; and the board that is a log in it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistStoreError

from shoal.comm.members.board import GroupMember
from shoal.comm.members.network_board import LOG, NetworkBoard, ServedBoard, entry_bytes
from shoal.comm.store import service as service_module
from shoal.comm.store.client import GuardedStore
from shoal.comm.store.service import StoreService
from shoal.comm.store.session import (
    AT_THE_END,
    MAGIC,
    MAX_FRAME_BYTES,
    FrameSession,
    StoreLink,
    StoreReply,
    StoreRequest,
    connect,
)
from shoal.errors import BadInput, PeerLost
from shoal.runtime.secret import (
    CODE_BYTES,
    NONCE_BYTES,
    REFUSED,
    Greeting,
    Stranger,
    code_of,
    new_secret,
    receive,
)

SECRET = new_secret()
GREETING_BYTES = len(MAGIC) + NONCE_BYTES


@pytest.fixture
def service() -> Iterator[StoreService]:
    made = StoreService("127.0.0.1", 0, SECRET)
    yield made
    while OPENED:
        OPENED.pop().close()
    made.close()


OPENED: list[GuardedStore] = []


def store_of(service: StoreService, secret: bytes = SECRET) -> GuardedStore:
    OPENED.append(GuardedStore("127.0.0.1", service.port, secret, timeout_s=20.0))
    return OPENED[-1]


def stranger(service: StoreService) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.port), 10.0)


def is_closed(sock: socket.socket) -> bool:
    """Whether the service closes it, whatever it has sent before."""
    sock.settimeout(10.0)
    with suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


def test_ranks_use_it_as_any_store(service: StoreService) -> None:
    one, two = store_of(service), store_of(service)
    one.set("key", "text")
    assert two.get("key") == b"text"
    assert two.check(["key"]) and not two.check(["key", "other"])
    assert [one.add("count", 2), two.add("count", -5)] == [2, -3]
    one.set("new", b"c")
    assert one.delete_key("key") and not one.delete_key("key")
    with pytest.raises(DistStoreError, match="not a counter"):
        one.add("new", 1)
    with pytest.raises(DistStoreError, match="timed out waiting"):
        two.wait(["key"], timedelta(milliseconds=20))
    assert two.get("new") == b"c"


@pytest.mark.parametrize("digits", [20, 30, 4300, 5000])
def test_a_counter_that_no_frame_holds_is_refused(service: StoreService, digits: int) -> None:
    store = store_of(service)
    store.set("count", "9" * digits)
    with pytest.raises(DistStoreError, match="beyond what a counter holds"):
        store.add("count", 1)
    assert store.add("another", 1) == 1


@pytest.mark.parametrize("body", [b"\x92\xa3set\x91\xa2\xff\xfe", b"\x91" * 5000, b"\xff", b""])
@pytest.mark.filterwarnings("error")  # for a thread that dies
def test_a_frame_that_is_no_request_ends_its_connection_alone(
    service: StoreService, body: bytes
) -> None:
    other, link = store_of(service), connect(("127.0.0.1", service.port), SECRET, 5.0)
    code = code_of(link._key, "client", bytes(8), body)
    link._sock.sendall(len(body).to_bytes(4, "little") + body + code)
    assert is_closed(link._sock)
    link.close()
    assert other.add("count", 1) == 1


def test_a_wait_does_not_hold_other_calls_of_its_rank(service: StoreService) -> None:
    store = store_of(service)
    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(store.get, "late") for _ in range(4)]
        store.set("other", "now")
        assert store.get("other") == b"now"
        store.set("late", "value")
        assert [wait.result() for wait in waits] == [b"value"] * 4


def test_a_rank_with_another_key_is_refused_and_the_others_go_on(service: StoreService) -> None:
    one = store_of(service)
    with pytest.raises(BadInput, match=r"another key, or none .*shoal keys show"):
        store_of(service, new_secret())
    one.set("key", "text")
    assert one.get("key") == b"text"


def test_a_rank_does_not_talk_to_a_service_that_does_not_know_the_key() -> None:
    with (
        closing(StoreService("127.0.0.1", 0, new_secret())) as other,
        pytest.raises(BadInput, match="is not the rendezvous of this run"),
    ):
        store_of(other)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(Stranger, match="does not know"):
        theirs.sendall(Greeting(new_secret(), MAGIC).challenge + b"\1" * CODE_BYTES)
        StoreLink(ours, SECRET)


@pytest.mark.parametrize("data", [b"\0" * 200, b"GET / HTTP/1.1\r\n\r\n" * 9, b"\xff" * 5000])
def test_garbage_ends_a_connection(service: StoreService, data: bytes) -> None:
    one = store_of(service)
    with stranger(service) as sock:
        receive(sock, GREETING_BYTES)
        sock.sendall(data)
        assert is_closed(sock)
    assert one.add("alive", 1) == 1


def test_a_recorded_handshake_does_not_open_another_connection(service: StoreService) -> None:
    """Nor do recorded frames: their codes are under the key of their connection."""
    with stranger(service) as sock:
        greeting = Greeting(SECRET, MAGIC)
        hello = greeting.hello(receive(sock, GREETING_BYTES))
        sock.sendall(hello)
        receive(sock, CODE_BYTES)
        session = FrameSession(sock, greeting.session_key, "client")
        frame = session.pack(StoreRequest("set", ["key"], b"once"))
        sock.sendall(frame)
        assert session.receive(StoreReply) == StoreReply()
        with stranger(service) as again:
            receive(again, GREETING_BYTES)
            again.sendall(hello + frame)
            assert receive(again, CODE_BYTES) == REFUSED
            assert is_closed(again)
        sock.sendall(frame)  # the same number twice, in its own connection
        assert is_closed(sock)
    assert store_of(service).get("key") == b"once"


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_frame_that_is_too_long_ends_its_connection(service: StoreService, length: int) -> None:
    with stranger(service) as sock:
        StoreLink(sock, SECRET)
        sock.sendall(length.to_bytes(4, "little"))
        assert is_closed(sock)


def test_strangers_by_the_hundred_do_not_keep_ranks_out(service: StoreService) -> None:
    """Connections that say nothing, or half of a handshake; the oldest are closed first."""
    count = service_module.MAX_STRANGERS + 100
    socks = [stranger(service) for _ in range(count)]
    for sock in socks[::2]:
        with suppress(ConnectionError):  # closed already
            sock.sendall(b"x" * 63)
    one = store_of(service)
    one.set("key", "text")
    assert one.get("key") == b"text"
    assert is_closed(socks[0])
    for sock in socks:
        sock.close()


def test_a_stranger_that_says_nothing_is_closed(
    service: StoreService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "HANDSHAKE_S", 0.1)
    with stranger(service) as sock:
        assert is_closed(sock)


def test_ranks_that_wait_notice_the_end_of_the_service() -> None:
    service = StoreService("127.0.0.1", 0, SECRET)
    store = store_of(service)
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(store.get, "never")
        while not service._waiting:
            time.sleep(0.005)
        service.close()
        with pytest.raises(DistStoreError, match="connection was closed"):
            wait.result()


def test_a_rank_that_comes_first_waits_for_the_service(service: StoreService) -> None:
    port = service.port
    service.close()
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(GuardedStore, "127.0.0.1", port, SECRET, 20.0)
        with closing(StoreService("127.0.0.1", port, SECRET)), closing(opening.result()) as store:
            store.set("key", "text")
            assert store.get("key") == b"text"


def test_a_port_that_is_taken_is_one_sentence(service: StoreService) -> None:
    with pytest.raises(BadInput, match="MASTER_PORT to a free port"):
        StoreService("127.0.0.1", service.port, SECRET)


def test_both_ends_of_a_connection_notice_a_host_that_is_silent(service: StoreService) -> None:
    store = store_of(service)
    ends = [store._free[0]._sock, *service._greeter._threads]
    assert len(ends) == 2
    for sock in ends:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10


# ------------------------------------------------------------------ the board of a run


@contextmanager
def opened(
    service: StoreService, worker: int, run: int = 1
) -> Iterator[tuple[NetworkBoard, list[Any]]]:
    taken: list[Any] = []
    address = ("127.0.0.1", service.port)
    with closing(NetworkBoard(address, SECRET, GroupMember(worker, 0), run)) as board:
        board.take = taken.append
        yield board, taken


def wait_for(board: NetworkBoard, taken: list[Any], count: int) -> None:
    while len(taken) < count:
        board.look()
        threading.Event().wait(0.001)


def test_who_appends_has_seen_all_documents_before_its_own(service: StoreService) -> None:
    def count(worker: int) -> list[Any]:
        with opened(service, worker) as (board, taken):
            for _ in range(20):
                board.append(lambda: {"number": len(taken), "by": worker})
            wait_for(board, taken, 60)
            return taken

    found: list[list[Any]] = []
    threads = [threading.Thread(target=lambda w=w: found.append(count(w))) for w in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [document["number"] for document in found[0]] == list(range(60))
    assert found[0] == found[1] == found[2]


def test_documents_of_another_call_of_the_script_are_not_handed_over(
    service: StoreService,
) -> None:
    with opened(service, 0, run=1) as (first, _), opened(service, 1, run=2) as (second, taken):
        first.append(lambda: {"run": 1})
        second.append(lambda: {"run": 2})
    assert taken == [{"run": 2}]


def test_what_a_process_appends_after_its_exit_does_not_count(service: StoreService) -> None:
    launcher = ServedBoard(service)
    me = GroupMember(1, 0)
    late = entry_bytes({"by": me, "run": 1, "document": {"after": 1}})
    with opened(service, 0) as (board, taken), opened(service, 1) as (lost, _):
        lost.append(lambda: {"before": 1})
        launcher.note_exit(me)
        service.post(StoreRequest("append", [LOG], late, number=AT_THE_END))
        launcher.note_start(GroupMember(1, 1))
        while not board.has_exited(me) or board.is_absent(1):
            board.look()
        board.append(lambda: {"end": 1})
        assert taken == [{"before": 1}, {"end": 1}]
        assert not board.has_exited(GroupMember(1, 1))
        with pytest.raises(PeerLost, match="reaching the launcher"):
            lost.append(lambda: {"after": 2})


def test_a_board_that_breaks_is_the_loss_of_this_worker(service: StoreService) -> None:
    lost: list[GroupMember] = []
    with opened(service, 2) as (board, _):
        board.watch(lost.append)
        service.close()
        with pytest.raises(PeerLost, match="rank 2 lost a peer after 3 s in reaching the launcher"):
            board.append(lambda: {})
        while not lost:
            threading.Event().wait(0.001)
    assert lost == [GroupMember(2, 0)]
