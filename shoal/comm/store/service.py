"""The store of a rendezvous: keys and values of ranks that prove the key of their run.

One thread serves all connections, none of which it waits for. A connection that has not proven
the key has a few seconds and 64 bytes; of many such the oldest of the host that has most of them is
closed first, since a rank needs one round trip only.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress

from shoal.comm.store.session import (
    ANSWER_BYTES,
    AT_THE_END,
    LENGTH_BYTES,
    LINK_SILENT_S,
    MAGIC,
    REFUSED,
    BadFrame,
    FrameSession,
    StoreReply,
    StoreRequest,
    frame_bytes,
    notice_silence,
)
from shoal.errors import BadInput
from shoal.runtime.acceptor import Acceptor, host_of, oldest_of_most
from shoal.runtime.secret import Greeting
from shoal.runtime.trust import is_loopback, without_key
from shoal.runtime.wording import say

_MAX_READ_BYTES = 1 << 20  # in one reply, unless one entry has more


class StoreTable:
    """The keys and values; without sockets."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._logs: dict[str, list[bytes]] = {}

    def answer(self, request: StoreRequest) -> StoreReply | None:
        """None as long as a key is not there that the request waits for."""
        keys = request.keys
        if request.operation == "check":
            return StoreReply(number=int(all(key in self._values for key in keys)))
        if request.operation == "wait":
            return StoreReply() if all(key in self._values for key in keys) else None
        if len(keys) != 1:
            return StoreReply(refusal=f"{request.operation} takes one key, not {len(keys)}")
        return self._of_one(request, keys[0])

    def _of_one(self, request: StoreRequest, key: str) -> StoreReply | None:
        if request.operation == "append":
            return self._append(key, request)
        if request.operation == "read":
            return self._read(key, request.number)
        if request.operation == "get":
            return StoreReply(self._values[key]) if key in self._values else None
        if request.operation == "delete":
            return StoreReply(number=int(self._values.pop(key, None) is not None))
        if request.operation == "add":
            return self._add(key, request.number)
        self._values[key] = request.value
        return StoreReply()

    def _add(self, key: str, number: int) -> StoreReply:
        text = self._values.get(key, b"0")
        try:
            total = int(text) + number
        except ValueError:
            return StoreReply(refusal=f"{key!r} is not a counter")
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
        end, num_bytes = start, 0
        while end < len(log) and (end == start or num_bytes + len(log[end]) <= _MAX_READ_BYTES):
            num_bytes += len(log[end])
            end += 1
        return StoreReply(values=log[start:end], number=end)


HANDSHAKE_S = 5.0
MAX_STRANGERS = 128
_BACKLOG = 1024
_CHUNK_BYTES = 256 * 1024
_MAX_UNSENT_BYTES = 64 << 20


class StoreService:
    """Listens from the moment it is made until `close`, or the end of the process.

    `listener` is a socket that listens already. `on_gone` is called, from the thread of this
    service, with the name of a process that was `present` and whose connection has broken.
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
        self._posted: deque[StoreRequest] = deque()
        self._acceptor = Acceptor(listener or _listen(host, port, bool(secret)))
        self._listener = self._acceptor.sock
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._strangers: OrderedDict[_Client, None] = OrderedDict()  # the oldest first
        self._waiting: dict[_Client, StoreRequest] = {}
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="shoal-store", daemon=True)
        self._thread.start()

    def post(self, request: StoreRequest) -> None:
        """A request of this process, from any thread, to which it needs no reply."""
        self._posted.append(request)
        with suppress(OSError):  # it is closed, or is about to look anyway
            self._wake.send(b"\0")

    def close(self) -> None:
        """Ranks that still wait find their connection closed."""
        self._wake.close()
        self._thread.join()

    def _run(self) -> None:
        is_open = True
        while is_open:
            for key, events in self._selector.select(self._patience_s()):
                if key.fileobj is self._woken:
                    is_open = bool(self._woken.recv(_CHUNK_BYTES))
                    self._take_posted()
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._clients:
                    self._serve(key.data, events)
            self._close_late()
        self._on_gone = lambda name: None
        for client in list(self._clients):
            self._drop(client)
        self._selector.close()
        self._acceptor.close()
        self._woken.close()

    # ------------------------------------------------------------------ strangers

    def _patience_s(self) -> float | None:
        oldest = next(iter(self._strangers), None)
        return None if oldest is None else max(0.0, oldest.deadline_s - time.monotonic())

    def _close_late(self) -> None:
        now_s = time.monotonic()
        while (oldest := next(iter(self._strangers), None)) and oldest.deadline_s <= now_s:
            self._drop(oldest)

    def _accept(self) -> None:
        sock = self._acceptor.accept_now(self._drop_stranger)
        if sock is None:
            return
        client = _Client(sock, Greeting(self._secret, MAGIC))
        if len(self._strangers) >= MAX_STRANGERS:
            self._drop_stranger()
        try:
            client.prepare()
            self._selector.register(sock, selectors.EVENT_READ, client)
        except OSError:  # it has ended
            sock.close()
            return
        self._strangers[client] = None
        self._clients.add(client)
        try:
            self._send(client, client.greeting.challenge)
        except OSError:
            self._drop(client)

    def _drop_stranger(self) -> bool:
        """A flood from one host ends its own connections, not those of others."""
        if self._strangers:
            self._drop(oldest_of_most({client: client.host for client in self._strangers})[0])
            return True
        return False

    # ------------------------------------------------------------------ ranks

    def _serve(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(client)
            if events & selectors.EVENT_READ:
                self._receive(client)
        except (OSError, BadFrame):
            self._drop(client)

    def _receive(self, client: _Client) -> None:
        data = client.sock.recv(client.wants())
        if not data:
            raise BadFrame("closed")
        client.inbox += data
        if client.session is None:
            self._greet(client)
        else:
            while (request := client.next_request()) is not None:
                self._handle(client, request)

    def _greet(self, client: _Client) -> None:
        if len(client.inbox) < ANSWER_BYTES:
            return
        if client.greeting.accept(bytes(client.inbox)) is None:
            self._say_refused(client.host)
            with suppress(OSError):
                client.sock.send(REFUSED)
            raise BadFrame("the client does not prove the key")
        client.session = FrameSession(client.greeting.session_key, "service")
        client.inbox.clear()
        del self._strangers[client]
        self._send(client, client.greeting.welcome)

    def _say_refused(self, host: str) -> None:
        """Once: a rank with another key is a mistake that others wait for; strangers are many."""
        if not self._has_refused:
            self._has_refused = True
            say(
                f"the rendezvous has refused a process at {host} that has another key than this "
                "run, or none (`shoal keys show` tells keys apart); others are not reported"
            )

    def _take_posted(self) -> None:
        while self._posted:
            request = self._posted.popleft()
            self._table.answer(request)
            self._wake_waiting(request.keys)

    def _handle(self, client: _Client, request: StoreRequest) -> None:
        if client in self._waiting:
            raise BadFrame("a request while another one waits")
        if request.operation == "present":
            client.name = request.keys[0] if request.keys else None
            notice_silence(client.sock)
            self._reply(client, StoreReply())
            return
        reply = self._table.answer(request)
        if reply is None:
            self._waiting[client] = request
            return
        self._reply(client, reply)
        if request.operation in ("set", "add", "append"):
            self._wake_waiting(request.keys)

    def _wake_waiting(self, changed: list[str]) -> None:
        for client, request in list(self._waiting.items()):
            reply = None
            if any(key in changed for key in request.keys):
                reply = self._table.answer(request)
            if reply is not None:
                del self._waiting[client]
                try:
                    self._reply(client, reply)
                except (OSError, BadFrame):
                    self._drop(client)

    def _reply(self, client: _Client, reply: StoreReply) -> None:
        assert client.session is not None
        self._send(client, client.session.pack(reply))

    def _send(self, client: _Client, data: bytes) -> None:
        client.outbox += data
        if len(client.outbox) > _MAX_UNSENT_BYTES:
            raise BadFrame("the client does not read")
        with suppress(ConnectionError):  # found when it is read from
            self._flush(client)

    def _flush(self, client: _Client) -> None:
        with suppress(BlockingIOError):
            sent = client.sock.send(client.outbox)
            del client.outbox[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outbox else 0)
        self._selector.modify(client.sock, events, client)

    def _drop(self, client: _Client) -> None:
        self._strangers.pop(client, None)
        self._waiting.pop(client, None)
        self._clients.discard(client)
        self._selector.unregister(client.sock)
        client.sock.close()
        if client.name is not None:
            self._on_gone(client.name)


class _Client:
    """One connection: what has come and what has still to go."""

    def __init__(self, sock: socket.socket, greeting: Greeting):
        self.sock = sock
        self.host = host_of(sock)
        self.greeting = greeting
        self.session: FrameSession | None = None
        self.name: str | None = None  # of the process whose presence it shows
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.deadline_s = time.monotonic() + HANDSHAKE_S

    def prepare(self) -> None:
        """An OSError if it has ended."""
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_silence(self.sock, LINK_SILENT_S)

    def wants(self) -> int:
        return _CHUNK_BYTES if self.session else ANSWER_BYTES - len(self.inbox)

    def next_request(self) -> StoreRequest | None:
        """The next complete frame of what has come; BadFrame where it is none of a rank."""
        assert self.session is not None
        if len(self.inbox) < LENGTH_BYTES:
            return None
        end = LENGTH_BYTES + frame_bytes(bytes(self.inbox[:LENGTH_BYTES]))
        if len(self.inbox) < end:
            return None
        frame = bytes(self.inbox[LENGTH_BYTES:end])
        del self.inbox[:end]
        return self.session.unpack(StoreRequest, frame)


def _listen(host: str, port: int, is_keyed: bool) -> socket.socket:
    """At this address; with a key also at all of this host, where it is behind NAT."""
    if not is_keyed and not is_loopback(host):
        raise BadInput(without_key(f"the rendezvous at {host}"))
    errors: list[OSError] = []
    for name in (host, "") if is_keyed else (host,):
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
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock
