"""Decisions of the leader's shard on their way to the heads of other shards.

head of shard k ── FOLLOW index, position ──> head of shard 0
head of shard 0 ── ENTRY …, NORMS divisor ──> head of shard k, which executes them in its chain

Each entry that is sent has been committed in shard 0, also where consistency is eventual. A new
head on either side subscribes again, with the position that its state has.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from shoal.errors import ShoalError
from shoal.runtime.config import TlsConfig
from shoal.server.model.membership import ModelFailure
from shoal.server.model.served_model import ServedModel
from shoal.server.protocol.connection import Closed, Connection
from shoal.server.protocol.endpoint import PLAIN, connect
from shoal.server.protocol.frames import FrameKind, Header, Refused, decode, encode
from shoal.server.protocol.handshake import authenticate
from shoal.server.protocol.messages import Follow, LogEntry, Norms, NormsRequest
from shoal.server.replicas.operations import Decided, Execute, Payload
from shoal.server.replicas.place import Elsewhere

_RETRY_S = 0.05
_CONNECT_S = 2.0
_MAX_NORMS_BYTES = 32 << 20
_MAX_ENTRY_BYTES = 8192
_POLL_S = 1.0


class StreamFollowers:
    """The leader's side: each connection has a thread that sends what its follower lacks."""

    def __init__(self, model: ServedModel):
        self._model = model
        self._is_closed = False
        self._current: dict[int, Connection] = {}  # by index of the server
        self._asked: tuple[int, float] | None = None  # version and divisor of the open step
        self._norms: dict[int, tuple[float, ...]] = {}
        model.log.followers = self

    def serve(self, request: Follow, connection: Connection) -> None:
        index = request.index
        model = self._model
        with model.lock:
            if not 0 < index < model.spec.servers:
                raise Refused(f"server {index} is not expected here")
            model.log.entries_after(request.position)  # refuses one that is too old
            displaced = self._current.get(index)
            self._current[index] = connection
            model.lock.notify_all()
        if displaced is not None:
            displaced.abort()
        connection.send(Header(FrameKind.OK))
        self._stream(index, request.position, connection)

    def _stream(self, index: int, position: int, connection: Connection) -> None:
        asked: tuple[int, float] | None = None  # over this connection
        while (work := self._next_work(index, position, asked, connection)) is not None:
            entries, norms = work
            for entry in entries:
                connection.send(Header(FrameKind.ENTRY), encode(entry))
                position = entry.position
            if norms is not None:
                asked = norms
                connection.send(Header(FrameKind.NORMS), encode(NormsRequest(norms[1])))
                header, meta = connection.receive(_MAX_NORMS_BYTES)
                if header.kind is not FrameKind.NORMS:
                    raise Refused(f"expected NORMS, got {header.kind.name}")
                self._take(index, norms, decode(meta, Norms).values)

    def _next_work(
        self, index: int, position: int, asked: tuple[int, float] | None, connection: Connection
    ) -> tuple[list[LogEntry], tuple[int, float] | None] | None:
        model = self._model

        def norms() -> tuple[int, float] | None:
            if model.log.shared not in (None, model.log.position):
                return None  # they are of pushes that the follower does not know yet
            is_new = self._asked is not None and self._asked != asked
            return self._asked if is_new and index not in self._norms else None

        def is_over() -> bool:
            return self._is_closed or self._current.get(index) is not connection

        with model.lock:
            while not is_over():
                entries = model.log.shared_after(position)
                if entries or norms() is not None:
                    return entries, norms()
                model.lock.wait(_POLL_S)
        return None

    def _take(self, index: int, asked: tuple[int, float], values: tuple[float, ...]) -> None:
        with self._model.lock:
            if self._asked == asked:
                self._norms[index] = values
                self._model.lock.notify_all()

    def close(self) -> None:
        with self._model.lock:
            self._is_closed = True
            self._model.lock.notify_all()
            for connection in self._current.values():
                connection.abort()

    # ------------------------------------------------------------------ under the model's lock

    def wait_connected(self) -> None:
        return None  # a follower that connects later gets what it lacks

    def publish(self, entry: LogEntry) -> None:
        return None  # streams read the log

    def request_norms(self, divisor: float) -> None:
        self._norms = {}
        self._asked = (self._model.version + 1, divisor)
        self._model.lock.notify_all()

    def receive_norms(self) -> list[float]:
        """Releases the lock while it waits."""
        wanted = range(1, self._model.spec.servers)
        while not self._norms.keys() >= set(wanted):
            self._model.membership.check()
            if self._is_closed:
                raise ModelFailure("the server was stopped")
            self._model.lock.wait(_POLL_S)
        self._asked = None
        return [norm for index in wanted for norm in self._norms[index]]


class StreamFollower:
    """Another shard's side: a thread of its head, for one model."""

    def __init__(
        self,
        number: int,
        model: ServedModel,
        leader: Callable[[int], str | None],
        secret: bytes,
        execute: Execute,
        is_head: Callable[[], bool],
        tls: TlsConfig = PLAIN,
    ):
        """`leader` says which address of shard 0 an attempt tries, if it is known; the thread ends
        when this is no head."""
        self._number = number
        self._model = model
        self._leader = leader
        self._secret = secret
        self._execute = execute
        self._is_head = is_head
        self._tls = tls
        self._is_closed = False
        self._connection: Connection | None = None
        name = f"shoal-follow-{model.spec.index}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._is_closed = True
        connection = self._connection
        if connection is not None:
            connection.abort()

    def join(self, timeout_s: float) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        attempt = 0
        while not self._is_closed and self._is_head():
            address = self._leader(attempt)
            with suppress(OSError, ShoalError, ModelFailure, Elsewhere):
                if address is not None:
                    self._follow(address)
            connection = self._connection
            self._connection = None
            if connection is not None:
                connection.close()
            attempt += 1
            time.sleep(_RETRY_S)

    def _follow(self, address: str) -> None:
        connection = connect(address, self._tls, _CONNECT_S)
        self._connection = connection
        spec = self._model.spec
        leading = spec.split.leader_model
        header = Header(
            FrameKind.HELLO,
            spec.index,
            self._number if leading is None else leading,
            secrets.randbits(62),
        )
        connection.sock.settimeout(_CONNECT_S)
        authenticate(connection, self._secret, "follow", header)
        request = Follow(spec.index, self._model.log.position)
        connection.send(header._replace(kind=FrameKind.FOLLOW), encode(request))
        answer, _ = connection.receive(_MAX_ENTRY_BYTES)
        connection.sock.settimeout(None)
        while answer.kind is not FrameKind.ERROR and not self._is_closed:
            answer = self._receive(connection)

    def _receive(self, connection: Connection) -> Header:
        header, meta = connection.receive(_MAX_ENTRY_BYTES)
        if header.kind is FrameKind.NORMS:
            norms = self._model.norms(decode(meta, NormsRequest).divisor)
            connection.send(Header(FrameKind.NORMS), encode(Norms(tuple(norms))))
        elif header.kind is FrameKind.ENTRY:
            entry = decode(meta, LogEntry)
            if entry.position > self._model.log.position:
                self._execute(Decided(self._number, entry), Payload())
        elif header.kind is not FrameKind.ERROR:
            raise Closed(f"expected ENTRY, got {header.kind.name}")
        return header
