"""The store of a rendezvous: keys and values of ranks that prove the key of their run.

Each connection has a thread. One that has not proven the key has a few seconds and 64 bytes; of
many such the oldest of the host that has most of them is closed first, since a rank needs one round
trip only.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from shoal.comm.store.session import (
    AT_THE_END,
    MAGIC,
    SILENT_HOST_S,
    BadFrame,
    FrameSession,
    StoreReply,
    StoreRequest,
)
from shoal.errors import BadInput
from shoal.runtime.acceptor import Acceptor, Greeter, Strangers, host_of, notice_silence
from shoal.runtime.secret import Greeting, Stranger
from shoal.runtime.trust import is_loopback
from shoal.runtime.wording import say

_MAX_DIGITS = 20
_MAX_READ_BYTES = 1 << 20  # in one reply, unless one entry has more


class StoreTable:
    """The keys and values; without sockets."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._logs: dict[str, list[bytes]] = {}

    def answer(self, request: StoreRequest) -> StoreReply | None:
        """None as long as a key is not there that the request waits for."""
        operation = request.operation
        keys = request.keys
        values = self._values
        has_all = all(key in values for key in keys)
        if operation == "check":
            return StoreReply(number=int(has_all))
        if operation == "wait":
            return StoreReply() if has_all else None
        if len(keys) != 1:
            return StoreReply(refusal=f"{operation} takes one key, not {len(keys)}")
        (key,) = keys
        match operation:
            case "append":
                return self._append(key, request)
            case "read":
                return self._read(key, request.number)
            case "get":
                return StoreReply(values[key]) if has_all else None
            case "delete":
                return StoreReply(number=int(values.pop(key, None) is not None))
            case "add":
                return self._add(key, request.number)
        values[key] = request.value
        return StoreReply()

    def _add(self, key: str, number: int) -> StoreReply:
        text = self._values.get(key, b"0")
        try:
            total = int(text[: _MAX_DIGITS + 1]) + number
        except ValueError:
            return StoreReply(refusal=f"{key!r} is not a counter")
        if len(text) > _MAX_DIGITS or abs(total) >= 1 << 63:
            return StoreReply(refusal=f"{key!r} is beyond what a counter holds")
        self._values[key] = b"%d" % total
        return StoreReply(number=total)

    def _append(self, key: str, request: StoreRequest) -> StoreReply:
        """-1 where the log has another length than the one who appends has seen."""
        log = self._logs.setdefault(key, [])
        if request.number not in (AT_THE_END, len(log)):
            return StoreReply(number=-1)
        log.append(request.value)
        return StoreReply(number=len(log))

    def _read(self, key: str, start: int) -> StoreReply | None:
        """What comes at `start` and after it, as much as one reply takes; `number`: read next."""
        log = self._logs.get(key, [])
        if start < 0 or start >= len(log):
            return None if start == len(log) else StoreReply(refusal=f"{key!r} is shorter")
        end = start
        num_bytes = 0
        while end < len(log) and (end == start or num_bytes + len(log[end]) <= _MAX_READ_BYTES):
            num_bytes += len(log[end])
            end += 1
        return StoreReply(values=log[start:end], number=end)


HANDSHAKE_S = 5.0
MAX_STRANGERS = 128
_BACKLOG = 1024
_LOOK_S = 1.0  # how often a request that waits sees whether its client has gone


class StoreService:
    """Listens from the moment it is made until `close`, or the end of the process.

    `listener` is a socket that listens already. `on_gone` is called, by one thread at a time, with
    the name of a process that was `present` and whose connection has broken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        listener: socket.socket | None = None,
        on_gone: Callable[[str], None] = lambda name: None,
    ):
        self._secret = secret
        self._table = StoreTable()
        self._on_gone = on_gone
        self._has_refused = False
        self._is_closed = False
        self._lock = threading.Lock()
        self._losing = threading.Lock()
        self._waiting: dict[socket.socket, tuple[StoreRequest, Future[StoreReply]]] = {}
        self._greeter = Greeter("shoal-store", Strangers(MAX_STRANGERS))
        assert secret
        self._acceptor = Acceptor(listener or _listen(host, port))
        self._acceptor.sock.setblocking(True)
        self.port = int(self._acceptor.sock.getsockname()[1])
        self._greeter.start(self._acceptor.accept, self._serve)

    def post(self, request: StoreRequest) -> None:
        """A request of this process, from any thread, to which it needs no reply."""
        with self._lock:
            self._table.answer(request)
            self._end_waits(request.keys)

    def close(self) -> None:
        """Ranks that still wait find their connection closed."""
        self._acceptor.close()
        with self._lock:
            self._is_closed = True
            for _, waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionResetError("the service has ended"))
        self._greeter.close()

    # ------------------------------------------------------------------ connections

    def _serve(self, sock: socket.socket) -> None:
        names: list[str] = []  # of the process whose presence it shows
        try:
            session = self._greeted(sock)
            while True:
                request = session.receive(StoreRequest)
                if request.operation == "present":
                    names = request.keys[:1]
                    notice_silence(sock, SILENT_HOST_S)
                    session.send(StoreReply())
                else:
                    session.send(self._answer(sock, request))
        except (OSError, BadFrame, Stranger):
            pass
        except Exception as error:  # of what this client has sent: others are served
            say(f"the rendezvous has closed a connection from {host_of(sock)}: {error!r}")
        with self._losing:
            for name in names:
                if not self._is_closed:
                    self._on_gone(name)

    def _greeted(self, sock: socket.socket) -> FrameSession:
        """Within HANDSHAKE_S, and in no more bytes than a hello has."""
        notice_silence(sock)
        greeting = Greeting(self._secret, MAGIC)
        try:
            greeting.admit(sock, limit_s=HANDSHAKE_S)
        except Stranger:
            self._say_refused(host_of(sock))
            raise
        if not self._greeter.strangers.remove(sock):
            raise Stranger("it was to end for another")
        sock.settimeout(None)
        sock.sendall(greeting.welcome)
        return FrameSession(sock, greeting.session_key, "service")

    def _say_refused(self, host: str) -> None:
        """Once: a rank with another key is a mistake that others wait for; strangers are many."""
        if not self._has_refused:
            self._has_refused = True
            say(
                f"the rendezvous has refused a process at {host} that has another key than this "
                "run, or none (`shoal keys show` tells keys apart); others are not reported"
            )

    # ------------------------------------------------------------------ requests

    def _answer(self, sock: socket.socket, request: StoreRequest) -> StoreReply:
        with self._lock:
            reply = self._table.answer(request)
            if reply is not None:
                self._end_waits(request.keys)
                return reply
            waiting: Future[StoreReply] = Future()
            self._waiting[sock] = request, waiting
        try:
            while not wait([waiting], _LOOK_S).done:
                if self._is_closed or not _is_open(sock):
                    raise ConnectionResetError("one of both has ended")
            return waiting.result()
        finally:
            with self._lock:
                del self._waiting[sock]

    def _end_waits(self, changed: list[str]) -> None:
        """Under the lock: answer the requests that can be answered now."""
        for request, waiting in self._waiting.values():
            if not waiting.done() and any(key in changed for key in request.keys):
                reply = self._table.answer(request)
                if reply is not None:
                    waiting.set_result(reply)


def _is_open(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True


def _listen(host: str, port: int) -> socket.socket:
    """At this address, or at all of this host, where it is behind NAT."""
    errors: list[OSError] = []
    for name in (host,) if is_loopback(host) else (host, ""):
        try:
            return _listen_at(name, port)
        except OSError as error:
            errors.append(error)
    raise BadInput(
        f"the rendezvous cannot listen at {host}:{port}: {errors[0].strerror or errors[0]}; set "
        "MASTER_PORT to a free port of the host of rank 0"
    )


def _listen_at(host: str, port: int) -> socket.socket:
    passive = socket.AI_PASSIVE
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=passive)
    family, _, _, _, address = found[0]
    return socket.create_server(address, family=family, backlog=_BACKLOG)
