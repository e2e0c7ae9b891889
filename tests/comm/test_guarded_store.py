"""The store of a rendezvous: ranks with the key use it as any store; strangers get nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore

from shoal.comm.store import service as service_module
from shoal.comm.store.authenticated import own_generation
from shoal.comm.store.client import GuardedStore
from shoal.comm.store.service import StoreService
from shoal.comm.store.session import (
    ANSWER_BYTES,
    GREETING_BYTES,
    MAGIC,
    MAX_FRAME_BYTES,
    REFUSED,
    BadFrame,
    FrameSession,
    StoreRequest,
    greet,
)
from shoal.errors import BadInput
from shoal.runtime.secret import CODE_BYTES, Greeting, new_secret
from tests.descriptors import no_descriptors

SECRET = new_secret()


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


def read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (part := sock.recv(count - len(data))):
        data += part
    return data


def greeted(sock: socket.socket) -> tuple[FrameSession, bytes]:
    """After the handshake of a rank, and what it has said in it."""
    said: list[bytes] = []

    def send(hello: bytes) -> None:
        said.append(hello)
        sock.sendall(hello)

    session = greet(send, lambda count: read(sock, count), SECRET)
    return session, said[0]


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


def test_a_wait_does_not_hold_other_calls_of_its_rank(service: StoreService) -> None:
    store = store_of(service)
    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(store.get, "late") for _ in range(4)]
        store.set("other", "now")
        assert store.get("other") == b"now"
        store.set("late", "value")
        assert [wait.result() for wait in waits] == [b"value"] * 4


def test_torch_makes_groups_in_it(service: StoreService) -> None:
    def body(rank: int) -> float:
        store = store_of(service)
        mine = own_generation(PrefixStore("run", store), rank, 2)
        group = dist.ProcessGroupGloo(mine, rank, 2, timedelta(seconds=20))
        value = torch.full((3,), rank + 1.0)
        group.allreduce([value]).wait()
        store.close()
        return float(value[0])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(body, range(2))) == [3.0, 3.0]


def test_a_rank_with_another_key_is_refused_and_the_others_go_on(service: StoreService) -> None:
    one = store_of(service)
    with pytest.raises(BadInput, match=r"another key, or none .*shoal keys show"):
        store_of(service, new_secret())
    one.set("key", "text")
    assert one.get("key") == b"text"


def test_a_rank_does_not_talk_to_a_service_that_does_not_know_the_key() -> None:
    other = StoreService("127.0.0.1", 0, new_secret())
    with pytest.raises(BadInput, match="is not the rendezvous of this run"):
        store_of(other)
    other.close()
    said = iter([Greeting(new_secret(), MAGIC).challenge, b"\1" * CODE_BYTES])
    with pytest.raises(BadFrame, match="does not know"):
        greet(lambda hello: None, lambda count: next(said), new_secret())


@pytest.mark.parametrize("data", [b"\0" * 200, b"GET / HTTP/1.1\r\n\r\n" * 9, b"\xff" * 5000])
def test_garbage_ends_a_connection(service: StoreService, data: bytes) -> None:
    one = store_of(service)
    with stranger(service) as sock:
        read(sock, GREETING_BYTES)
        sock.sendall(data)
        assert is_closed(sock)
    assert one.add("alive", 1) == 1


def test_a_recorded_handshake_does_not_open_another_connection(service: StoreService) -> None:
    """Nor do recorded frames: their codes are under the key of their connection."""
    with stranger(service) as sock:
        session, hello = greeted(sock)
        frame = session.pack(StoreRequest("set", ["key"], b"once"))
        sock.sendall(frame)
        assert read(sock, 4)
        with stranger(service) as again:
            read(again, GREETING_BYTES)
            again.sendall(hello + frame)
            assert read(again, CODE_BYTES) == REFUSED
            assert is_closed(again)
        sock.sendall(frame)  # the same number twice, in its own connection
        assert is_closed(sock)
    one = store_of(service)
    assert one.get("key") == b"once"


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_frame_that_is_too_long_ends_its_connection(service: StoreService, length: int) -> None:
    with stranger(service) as sock:
        greeted(sock)
        sock.sendall(length.to_bytes(4, "little"))
        assert is_closed(sock)


def test_strangers_by_the_hundred_do_not_keep_ranks_out(service: StoreService) -> None:
    """Connections that say nothing, or half of a handshake; the oldest are closed first."""
    count = service_module.MAX_STRANGERS + 100
    socks = [stranger(service) for _ in range(count)]
    for sock in socks[::2]:
        with suppress(ConnectionError):  # closed already
            sock.sendall(b"x" * (ANSWER_BYTES - 1))
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


def test_a_process_without_descriptors_serves_its_ranks_and_takes_others_later(
    service: StoreService, capfd: pytest.CaptureFixture[str]
) -> None:
    one = store_of(service)
    one.set("key", "before")
    early = [socket.socket() for _ in range(2)]
    with no_descriptors():
        for sock in early:
            sock.settimeout(20.0)
            sock.connect(("127.0.0.1", service.port))
            assert sock.recv(1) == b"", "closed at once"
        assert one.get("key") == b"before"
    two = store_of(service)
    assert two.get("key") == b"before"
    assert capfd.readouterr().err.count("Too many open files") == 1
    for sock in early:
        sock.close()


def test_a_stranger_is_closed_for_a_rank_where_no_descriptor_is_left(service: StoreService) -> None:
    silent = stranger(service)
    read(silent, GREETING_BYTES)
    with socket.socket() as sock, no_descriptors():
        sock.settimeout(20.0)
        sock.connect(("127.0.0.1", service.port))
        assert len(read(sock, GREETING_BYTES)) == GREETING_BYTES
    assert is_closed(silent)
    silent.close()


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


def test_a_rank_that_comes_first_waits_for_the_service() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found: list[bytes] = []

    def rank() -> None:
        store = GuardedStore("127.0.0.1", port, SECRET, timeout_s=20.0)
        found.append(store.get("key"))
        store.close()

    thread = threading.Thread(target=rank)
    thread.start()
    service = StoreService("127.0.0.1", port, SECRET)
    store = store_of(service)
    store.set("key", "text")
    thread.join()
    assert found == [b"text"]
    store.close()
    service.close()


def test_a_port_that_is_taken_is_one_sentence(service: StoreService) -> None:
    with pytest.raises(BadInput, match="MASTER_PORT to a free port"):
        StoreService("127.0.0.1", service.port, b"")


def test_both_ends_of_a_connection_notice_a_host_that_is_silent(service: StoreService) -> None:
    store = store_of(service)
    ends = [store._free[0]._sock, *(client.sock for client in service._clients)]
    assert len(ends) == 2
    for sock in ends:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
