"""Accepts connections, whatever happens to them: the one place for all loops that accept.

    the connection has ended (ECONNABORTED …)          the next one, after a pause
    no descriptors, no memory (EMFILE, ENFILE …)       a stranger is ended for the newcomer; where
                                                       there is none, one that waits is closed
    the listener has failed (EBADF, EINVAL)            raised; None if it was closed

A loop without the pauses would take a core for as long as the condition lasts.
"""

from __future__ import annotations

import errno
import io
import os
import select
import socket
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shoal.runtime import clock
from shoal.runtime.wording import say

_PAUSE_S = 0.02
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_FAILED = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)


def no_room() -> bool:
    """For listeners whose connections need no proof."""
    return False


class Acceptor:
    """Accepts at a socket that listens, and owns it.

    A descriptor is kept in reserve: where the process has no other left, it serves to accept
    connections and close them, so that those who connect learn it at once and try again.
    """

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._closed = clock.Event()
        self._reserve = io.FileIO(os.devnull)
        self._has_said = False

    def accept(self, make_room: Callable[[], bool] = no_room) -> socket.socket | None:
        """The next connection, however long it takes; None once this is closed.

        `make_room` ends a connection that has not proven anything; False where there is none.
        """
        while not self._closed.is_set():
            accepted = self.accept_now(make_room)
            if accepted is not None:
                return accepted
        return None

    def accept_now(self, make_room: Callable[[], bool] = no_room) -> socket.socket | None:
        """One attempt; None where it has failed, after a pause, or where no connection waits."""
        try:
            return self.sock.accept()[0]
        except BlockingIOError:
            return None
        except OSError as error:
            if self._closed.is_set():
                return None
            if error.errno in _FAILED:
                raise
            if error.errno not in _SCARCE:
                self._closed.wait(_PAUSE_S)
            elif not make_room():
                self._shed(error)
            return None

    def close(self) -> None:
        """A thread that accepts returns."""
        self._closed.set()
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self._reserve.close()

    def _shed(self, error: OSError) -> None:
        """Close a waiting connection, and let those that end give descriptors back."""
        self._say(error)
        self._reserve.close()
        with suppress(OSError, ValueError):  # closed meanwhile
            poll = select.poll()
            poll.register(self.sock, select.POLLIN)
            if poll.poll(0):
                self.sock.accept()[0].close()
        with suppress(OSError):
            self._reserve = io.FileIO(os.devnull)
        if self._closed.wait(_PAUSE_S):
            self._reserve.close()

    def _say(self, error: OSError) -> None:
        if not self._has_said:
            self._has_said = True
            say(
                f"process {os.getpid()} closes connections that it cannot accept "
                f"({os.strerror(error.errno or 0)}), until others end: raise the limit with "
                "ulimit -n"
            )


def service_thread(name: str, target: Callable[..., None], *args: object) -> threading.Thread:
    """Serves others: they would wait without end for one that fails, so the process ends."""

    def run() -> None:
        try:
            target(*args)
        except BaseException as error:
            clock.check()
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            say(f"process {os.getpid()} ends: its thread {name} has failed ({error!r}, {where})")
            os._exit(1)

    return clock.Thread(target=run, name=name, daemon=True)


MAX_UNAUTHENTICATED = 64
GRACE_S = 0.5  # for a handshake, before a connection is ended for a newcomer
_MAX_ENDING = 64  # evicted ones, until their threads have closed them
_MAX_WAIT_S = 5.0
_FLOOD = 0.75  # of all places, for connections of one host


class _Arrival(NamedTuple):
    host: str
    at_s: float


class Strangers:
    """The oldest ones first. One too many ends the oldest of the host that has most of them.

    So a flood from one host does not keep others out, and silence ends when others arrive. With
    `grace_s` each has so long before it is ended for another, and newcomers wait: many that come
    at once, and prove the secret, do not end each other. A host that has almost all places has no
    grace: ranks do not come in such numbers, and others would wait for it.
    """

    def __init__(self, most: int = MAX_UNAUTHENTICATED, grace_s: float = 0.0) -> None:
        self._most = most
        self._grace_s = grace_s
        self._changed = clock.Condition()
        self._hosts: dict[socket.socket, _Arrival] = {}
        self._ending: set[socket.socket] = set()

    def __len__(self) -> int:
        return len(self._hosts)

    def add(self, sock: socket.socket) -> int:
        """Returns how many were ended for it. Waits where too many have not been closed yet."""
        with self._changed:
            evicted = 0
            while len(self._hosts) >= self._most:
                worst, left_s = self._worst()
                if left_s > 0 and self._changed.wait(left_s):
                    continue
                if worst in self._hosts:
                    self._end(worst)
                    evicted += 1
            self._changed.wait_for(lambda: len(self._ending) < _MAX_ENDING, _MAX_WAIT_S)
            self._hosts[sock] = _Arrival(host_of(sock), clock.monotonic())
            return evicted

    def make_room(self) -> bool:
        """End the one that a newcomer would end, and wait until its descriptor is free.

        False where there is none. One that has proven the secret meanwhile is not ended.
        """
        with self._changed:
            if not self._hosts:
                return False
            worst, left_s = self._worst()
            self._changed.wait_for(lambda: worst not in self._hosts, max(0.0, left_s))
            if worst in self._hosts:
                self._end(worst)
            return self._changed.wait_for(lambda: worst not in self._ending, _MAX_WAIT_S)

    def remove(self, sock: socket.socket) -> bool:
        """It has proven the secret, or has ended. False if it was to end."""
        with self._changed:
            is_here = self._hosts.pop(sock, None) is not None
            self._ending.discard(sock)
            self._changed.notify_all()
            return is_here

    def end_all(self) -> None:
        with self._changed:
            for sock in list(self._hosts):
                self._end(sock)
            self._changed.notify_all()

    def _worst(self) -> tuple[socket.socket, float]:
        """The one to end next: the oldest of the host that has most. And in how many seconds."""
        counts = Counter(arrival.host for arrival in self._hosts.values())
        worst = max(self._hosts, key=lambda sock: counts[self._hosts[sock].host])  # or the first
        if counts[self._hosts[worst].host] > _FLOOD * self._most:
            return worst, 0.0
        return worst, self._hosts[worst].at_s + self._grace_s - clock.monotonic()

    def _end(self, sock: socket.socket) -> None:
        del self._hosts[sock]
        self._ending.add(sock)
        end_socket(sock)


Accept = Callable[[Callable[[], bool]], socket.socket | None]  # see `Acceptor.accept`
Serve = Callable[[socket.socket], object]  # a socket for which it returns True stays open


class Greeter:
    """A thread for each connection that comes, which greets it and serves it to its end.

    `note` is called with the reason where a connection ends before it is served.
    """

    def __init__(
        self, name: str, strangers: Strangers, note: Callable[[str], None] = lambda reason: None
    ):
        self.strangers = strangers
        self._name = name
        self._note = note
        self._lock = clock.Lock()
        self._accepting: list[threading.Thread] = []
        self._threads: dict[socket.socket, threading.Thread] = {}

    def start(self, accept: Accept, serve: Serve) -> None:
        thread = service_thread(f"{self._name}-accept", self._accept_all, accept, serve)
        self._accepting.append(thread)
        thread.start()

    def close(self, join_s: float | None = None) -> None:
        """End all connections, and wait for their threads; `accept` returns None by now."""
        self.strangers.end_all()  # the thread that accepts may wait for one of them
        for thread in self._accepting:
            thread.join(join_s)
        with self._lock:
            threads = dict(self._threads)
        for sock in threads:
            end_socket(sock)
        for thread in threads.values():
            if thread is not threading.current_thread():
                thread.join(join_s)

    def _accept_all(self, accept: Accept, serve: Serve) -> None:
        while (sock := accept(self.strangers.make_room)) is not None:
            for _ in range(self.strangers.add(sock)):
                self._note("too many unauthenticated connections")
            thread = service_thread(self._name, self._serve, serve, sock)
            with self._lock:
                self._threads[sock] = thread
            try:
                thread.start()
            except RuntimeError:  # as many threads as this process may have: it tries again
                self._note("no thread left")
                self._end(sock, False)

    def _serve(self, serve: Serve, sock: socket.socket) -> None:
        is_kept = False
        try:
            is_kept = serve(sock) is True
        finally:
            self._end(sock, is_kept)

    def _end(self, sock: socket.socket, is_kept: bool) -> None:
        """Closed first: `make_room` waits for its descriptor."""
        if not is_kept:
            sock.close()
            self.strangers.remove(sock)
        with self._lock:
            del self._threads[sock]


def end_socket(sock: socket.socket) -> None:
    """End a connection; its thread closes it. SSLSocket.shutdown would make it a plain socket."""
    shutdown = socket.socket.shutdown if isinstance(sock, socket.socket) else type(sock).shutdown
    with suppress(OSError):
        shutdown(sock, socket.SHUT_RDWR)


def host_of(sock: socket.socket) -> str:
    """Empty for sockets of this host, and where the connection has ended already."""
    with suppress(OSError):
        name = sock.getpeername()
        if isinstance(name, tuple):
            return str(name[0])
    return ""


_PROBES = 3
SILENT_PEER_S = 30.0  # a host that acknowledges nothing is lost after so long


def notice_silence(sock: socket.socket, silent_s: float = SILENT_PEER_S) -> None:
    """Small frames go without delay; the connection breaks when the other host is silent so long.

    Sockets of this host stay as they are.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, max(1, int(silent_s / _PROBES))),
        (socket.TCP_KEEPINTVL, max(1, int(silent_s / _PROBES))),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_USER_TIMEOUT, int(1000 * silent_s)),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
