"""The leader's log on its way to the servers of other shards, and the norms on their way back.

follower ── FOLLOW position ─────────> leader
leader   ── ENTRY position + 1, … ───> follower    from the log, then as they are decided
leader   ── NORMS divisor ───────────> follower    before a step that clips
follower ── NORMS values ────────────> leader

Without copies the thread that decides sends each entry, before it takes effect here, and who is
lost fails the model. In a chain each connection has a thread that sends what is committed in the
leader's shard, and a new head on either side subscribes again, with the position of its state.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from shoal.errors import ShoalError
from shoal.runtime import clock
from shoal.runtime.config import TlsConfig
from shoal.server.member.place import Elsewhere
from shoal.server.messages import LogEntry, Norms, Scalar, WorkerLeft
from shoal.server.model.log import NoFollowers
from shoal.server.model.membership import ModelFailure
from shoal.server.model.served_model import ServedModel
from shoal.server.protocol import ErrorReply, FrameKind, Header, Refused, decode, encode
from shoal.server.protocol.connection import Closed, Connection
from shoal.server.protocol.endpoint import CONNECT_S
from shoal.server.protocol.handshake import dial

_RETRY_S = 0.05
_COPY_CONNECT_S = 2.0
_MAX_NORMS_BYTES = 32 << 20
_MAX_ENTRY_BYTES = 8192
_POLL_S = 1.0


class Followers(NoFollowers):
    """The leader's side: connections of the other servers, under the model's lock."""

    def __init__(self, model: ServedModel):
        self._model = model
        self._in_chain = model.in_chain
        self._connections: dict[int, Connection] = {}  # by index of the server
        self._closed = clock.Event()
        self._asked: tuple[int, float] | None = None  # version and divisor of the open step
        self._norms: dict[int, tuple[float, ...]] = {}
        model.log.followers = self

    def serve(self, index: int, position: int, connection: Connection) -> None:
        """Send a follower the entries after `position`; returns when it is served no more."""
        model = self._model
        with model.lock:
            displaced = self._connections.get(index)
            is_twice = displaced is not None and not self._in_chain
            if not 0 < index < model.spec.servers or is_twice:
                raise Refused(f"server {index} is not expected here")
            entries = model.log.entries_after(position)
            connection.send(Header(FrameKind.OK))
            if not self._in_chain:
                _send_entries(connection, entries)
            self._connections[index] = connection
            model.lock.notify_all()
        if displaced is not None:
            displaced.abort()
        if self._in_chain:
            self._stream(index, position, connection)
        else:
            self._closed.wait()

    def close(self) -> None:
        with self._model.lock:
            self._closed.set()
            self._model.lock.notify_all()
            for connection in self._connections.values() if self._in_chain else ():
                connection.abort()

    def wait_connected(self) -> None:
        """Between two decisions: releases the lock. In a chain, who connects later gets it all."""
        if self._in_chain:
            return
        wanted = self._model.spec.servers - 1
        if not self._model.lock.wait_for(lambda: len(self._connections) == wanted, CONNECT_S):
            missing = set(range(1, wanted + 1)) - self._connections.keys()
            raise self._failure(f"server {min(missing)} has not connected to the leader")
        self._model.membership.check()

    def publish(self, entry: LogEntry) -> None:
        """In a chain the threads of the connections read the log."""
        if not self._in_chain:
            # at the end of a run, a follower may close before the last workers leave here
            self._send(FrameKind.ENTRY, encode(entry), isinstance(entry.decision, WorkerLeft))

    def request_norms(self, divisor: float) -> None:
        if not self._in_chain:
            self._send(FrameKind.NORMS, encode(Scalar(divisor)))
            return
        self._norms = {}
        self._asked = (self._model.version + 1, divisor)
        self._model.lock.notify_all()

    def receive_norms(self) -> list[float]:
        """In a chain it releases the lock while it waits."""
        wanted = range(1, self._model.spec.servers)
        if not self._in_chain:
            for index in wanted:
                try:
                    self._norms[index] = _receive_norms(self._connections[index])
                except (Closed, Refused) as error:
                    raise self._failure(f"server {index} was lost ({error})") from error
        while not self._norms.keys() >= set(wanted):
            self._model.membership.check()
            if self._closed.is_set():
                raise ModelFailure("the server was stopped")
            self._model.lock.wait(_POLL_S)
        self._asked = None
        return [norm for index in wanted for norm in self._norms[index]]

    def _send(self, kind: FrameKind, meta: bytes, may_be_lost: bool = False) -> None:
        for index in sorted(self._connections):
            try:
                self._connections[index].send(Header(kind), meta)
            except Closed as error:
                if not may_be_lost:
                    raise self._failure(f"server {index} was lost ({error})") from error

    def _failure(self, reason: str) -> ModelFailure:
        self._model.fail(reason, is_loss=True)
        return self._model.membership.failure or ModelFailure(reason, is_loss=True)

    def _stream(self, index: int, position: int, connection: Connection) -> None:
        model = self._model
        asked: tuple[int, float] | None = None  # over this connection
        while True:
            with model.lock:
                if self._closed.is_set() or self._connections.get(index) is not connection:
                    return
                entries = model.log.entries_after(position, shared=True)
                # with others they are of pushes that it has not got
                is_known = model.log.shared in (None, model.log.position)
                is_new = self._asked != asked and index not in self._norms
                norms = self._asked if is_known and is_new else None
                if not entries and norms is None:
                    model.lock.wait(_POLL_S)
                    continue
            _send_entries(connection, entries)
            position += len(entries)
            if norms is not None:
                asked = norms
                connection.send(Header(FrameKind.NORMS), encode(Scalar(norms[1])))
                values = _receive_norms(connection)
                with model.lock:
                    if self._asked == norms:
                        self._norms[index] = values
                        model.lock.notify_all()


@dataclass(eq=False, repr=False)
class Follower:
    """Another shard's side: a thread that carries out the leader's decisions on one model.

    Without `is_head` it connects at once (Refused or an OSError if that fails), and the end of the
    connection fails the model. In a chain it connects again while this is the head, to the copies
    of the leader's shard in turn: `leader` says which address an attempt tries.
    """

    _model: ServedModel
    _number: int
    _secret: bytes
    _tls: TlsConfig
    _replay: Callable[[LogEntry], object]
    _leader: Callable[[int], str | None] = lambda attempt: None
    _is_head: Callable[[], bool] | None = None
    connection: Connection | None = None

    def __post_init__(self) -> None:
        self._is_closed = False
        if self._is_head is None:
            self._subscribe(self._model.spec.leader, CONNECT_S)
        run = self._follow_once if self._is_head is None else self._follow_again
        name = f"shoal-follow-{self._model.spec.index}"
        self._thread = clock.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._is_closed = True
        connection = self.connection
        if connection is not None:
            connection.abort()

    def join(self, timeout_s: float) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _follow_once(self) -> None:
        model = self._model
        try:
            self._read()
        except (Closed, Refused) as error:
            if not model.membership.is_over:
                model.fail(f"the leader was lost ({error})", is_loss=True)
        except Exception as error:
            model.fail(f"server {model.spec.index} failed: {error!r}"[:4000])
        finally:
            assert self.connection is not None
            self.connection.close()

    def _follow_again(self) -> None:
        attempt = 0
        assert self._is_head is not None
        while not self._is_closed and self._is_head():
            address = self._leader(attempt)
            with suppress(OSError, ShoalError, ModelFailure, Elsewhere):
                if address is not None:
                    self._subscribe(address, _COPY_CONNECT_S)
                    self._read()
            connection = self.connection
            self.connection = None
            if connection is not None:
                connection.close()
            attempt += 1
            clock.sleep(_RETRY_S)

    def _subscribe(self, address: str, timeout_s: float) -> None:
        spec = self._model.spec
        leading = spec.split.leader_model
        number = self._number if leading is None else leading
        header = Header(FrameKind.HELLO, spec.index, number, secrets.randbits(62))
        connection = dial(address, self._secret, "follow", header, self._tls, timeout_s)
        self.connection = connection
        try:
            position = self._model.log.position
            connection.send(header._replace(kind=FrameKind.FOLLOW, argument=position))
            answer, meta = connection.receive(_MAX_ENTRY_BYTES)
            if answer.kind is FrameKind.ERROR:
                raise Refused(decode(meta, ErrorReply).reason)
            _expect(answer, FrameKind.OK)
            connection.sock.settimeout(None)
        except BaseException:
            connection.close()
            raise

    def _read(self) -> None:
        connection = self.connection
        assert connection is not None
        while not self._is_closed:
            header, meta = connection.receive(_MAX_ENTRY_BYTES)
            if header.kind is FrameKind.NORMS:
                with self._model.lock:
                    norms = self._model.state.norms(decode(meta, Scalar).value)
                connection.send(Header(FrameKind.NORMS), encode(Norms(tuple(norms))))
            else:
                _expect(header, FrameKind.ENTRY)
                self._replay(decode(meta, LogEntry))


def _send_entries(connection: Connection, entries: list[LogEntry]) -> None:
    for entry in entries:
        connection.send(Header(FrameKind.ENTRY), encode(entry))


def _receive_norms(connection: Connection) -> tuple[float, ...]:
    header, meta = connection.receive(_MAX_NORMS_BYTES)
    _expect(header, FrameKind.NORMS)
    return decode(meta, Norms).values


def _expect(header: Header, kind: FrameKind) -> None:
    if header.kind is not kind or header.payload_bytes:
        raise Refused(f"expected {kind.name}, got {header.kind.name}")
