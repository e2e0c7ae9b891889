"""Loops that accept connections: what goes wrong with one ends neither the loop nor a core."""

from __future__ import annotations

import errno
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from shoal.runtime.acceptor import Acceptor, Strangers

SCARCE = [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM]
OF_ONE_CONNECTION = [errno.ECONNABORTED, errno.EPROTO, errno.ENETDOWN, errno.EPERM]


class FailingSocket(socket.socket):
    """Accepts when it has raised its errors."""

    def __init__(self, *numbers: int):
        super().__init__()
        self.bind(("127.0.0.1", 0))
        self.listen()
        self.errors = [OSError(number, "injected") for number in numbers]

    def accept(self) -> tuple[socket.socket, object]:
        if self.errors:
            raise self.errors.pop(0)
        return super().accept()


class Resting(threading.Event):
    """Knows when a thread begins to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.begun.set()
        return super().wait(timeout)


@pytest.fixture
def dialed() -> Iterator[list[socket.socket]]:
    socks: list[socket.socket] = []
    yield socks
    for sock in socks:
        sock.close()


@pytest.mark.parametrize("number", SCARCE + OF_ONE_CONNECTION)
def test_an_error_of_a_connection_is_followed_by_a_pause_and_the_next_connection(
    number: int, dialed: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.runtime.acceptor._PAUSE_S", 0.001)
    listening = FailingSocket(number, number)
    acceptor = Acceptor(listening)
    dialed.append(socket.create_connection(listening.getsockname()))
    assert select.select([listening], [], [], 20)[0]
    if number in SCARCE:  # the one that waits is closed, by the second call of accept
        listening.errors.pop()
        assert acceptor.accept_now() is None
        assert dialed[0].recv(1) == b""
        dialed.append(socket.create_connection(listening.getsockname()))
    accepted = acceptor.accept()
    assert accepted is not None and accepted.getpeername() == dialed[-1].getsockname()
    accepted.close()
    acceptor.close()
    assert acceptor.accept() is None


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED])
def test_a_loop_rests_after_an_error_and_ends_when_it_is_closed(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.runtime.acceptor._PAUSE_S", 60.0)
    listening = FailingSocket(*[number] * 1000)
    acceptor = Acceptor(listening)
    resting = acceptor._closed = Resting()
    ended: list[socket.socket | None] = []
    thread = threading.Thread(target=lambda: ended.append(acceptor.accept()))
    thread.start()
    resting.begun.wait()
    acceptor.close()
    thread.join()
    assert ended == [None]
    assert len(listening.errors) == 999


def test_a_process_without_descriptors_says_so_once(capfd: pytest.CaptureFixture[str]) -> None:
    acceptor = Acceptor(FailingSocket(errno.EMFILE, errno.EMFILE))
    assert acceptor.accept_now() is acceptor.accept_now() is None
    (said,) = capfd.readouterr().err.splitlines()
    assert "(Too many open files), until others end: raise the limit with ulimit -n" in said
    acceptor.close()


def test_a_listener_that_has_failed_is_no_endless_loop() -> None:
    acceptor = Acceptor(FailingSocket(errno.EBADF))
    with pytest.raises(OSError, match="injected"):
        acceptor.accept()
    acceptor.close()


def test_a_stranger_gives_its_descriptor_to_a_newcomer(dialed: list[socket.socket]) -> None:
    strangers = Strangers()
    listening = FailingSocket()
    acceptor = Acceptor(listening)
    dialed.append(socket.create_connection(listening.getsockname()))
    silent = acceptor.accept(strangers.make_room)
    assert silent is not None
    strangers.add(silent)

    def greet() -> None:
        with silent:
            assert silent.recv(1) == b"", "ended for the newcomer"
        strangers.remove(silent)

    thread = threading.Thread(target=greet)
    thread.start()
    listening.errors.append(OSError(errno.EMFILE, "injected"))
    dialed.append(socket.create_connection(listening.getsockname()))
    accepted = acceptor.accept(strangers.make_room)
    thread.join()
    assert accepted is not None and accepted.getpeername() == dialed[1].getsockname()
    assert not strangers.make_room()
    accepted.close()
    acceptor.close()
