"""The leader's log on its way to the followers, and the norms on their way back.

follower ── FOLLOW index, position ──> leader
leader   ── ENTRY position + 1, … ───> follower    from the log, then as they are decided
leader   ── NORMS divisor ───────────> follower    before a step that clips
follower ── NORMS values ────────────> leader
"""

from __future__ import annotations

import secrets
import threading

from shoal.runtime.config import TlsConfig
from shoal.server.model.membership import ModelFailure
from shoal.server.model.served_model import ServedModel
from shoal.server.protocol.connection import Closed, Connection
from shoal.server.protocol.endpoint import PLAIN, connect
from shoal.server.protocol.frames import FrameKind, Header, Refused, decode, encode
from shoal.server.protocol.handshake import authenticate
from shoal.server.protocol.messages import (
    ErrorReply,
    Follow,
    LogEntry,
    Norms,
    NormsRequest,
    WorkerLeft,
)

_CONNECT_S = 30.0
_MAX_NORMS_BYTES = 32 << 20
_MAX_ENTRY_BYTES = 8192


class Followers:
    """The leader's side: connections of the other servers, under the model's lock."""

    def __init__(self, model: ServedModel):
        self._model = model
        self._connections: dict[int, Connection] = {}
        self._closed = threading.Event()
        model.log.followers = self

    def serve(self, request: Follow, connection: Connection) -> None:
        """Send the entries that a follower lacks, and keep its connection until the end."""
        index = request.index
        with self._model.lock:
            if not 0 < index < self._model.spec.servers or index in self._connections:
                raise Refused(f"server {index} is not expected here")
            entries = self._model.log.entries_after(request.position)
            connection.send(Header(FrameKind.OK))
            for entry in entries:
                connection.send(Header(FrameKind.ENTRY), encode(entry))
            self._connections[index] = connection
            self._model.lock.notify_all()
        self._closed.wait()

    def close(self) -> None:
        self._closed.set()

    # ------------------------------------------------------------------ under the lock

    def wait_connected(self) -> None:
        """Releases the lock while it waits: the model must be between two decisions."""
        wanted = self._model.spec.servers - 1
        if not self._model.lock.wait_for(lambda: len(self._connections) == wanted, _CONNECT_S):
            missing = set(range(1, wanted + 1)) - self._connections.keys()
            raise self._failure(f"server {min(missing)} has not connected to the leader")
        self._model.membership.check()

    def publish(self, entry: LogEntry) -> None:
        meta = encode(entry)
        for index in sorted(self._connections):
            try:
                self._connections[index].send(Header(FrameKind.ENTRY), meta)
            except Closed as error:
                # at the end of a run, a follower may close before the last workers leave here
                if not isinstance(entry.decision, WorkerLeft):
                    raise self._failure(f"server {index} was lost ({error})") from error

    def request_norms(self, divisor: float) -> None:
        meta = encode(NormsRequest(divisor))
        for index in sorted(self._connections):
            try:
                self._connections[index].send(Header(FrameKind.NORMS), meta)
            except Closed as error:
                raise self._failure(f"server {index} was lost ({error})") from error

    def receive_norms(self) -> list[float]:
        return [norm for index in sorted(self._connections) for norm in self._norms_of(index)]

    def _norms_of(self, index: int) -> tuple[float, ...]:
        try:
            header, meta = self._connections[index].receive(_MAX_NORMS_BYTES)
            _expect(header, FrameKind.NORMS)
            return decode(meta, Norms).values
        except (Closed, Refused) as error:
            raise self._failure(f"server {index} was lost ({error})") from error

    def _failure(self, reason: str) -> ModelFailure:
        self._model.fail(reason, is_loss=True)
        return self._model.membership.failure or ModelFailure(reason, is_loss=True)


class Follower:
    """A follower's side: a thread that applies the leader's entries while the leader is there."""

    def __init__(
        self, model: ServedModel, leader_model: int, secret: bytes, tls: TlsConfig = PLAIN
    ):
        """Connects to the leader of `leader_model`; Refused or an OSError if that fails."""
        self._model = model
        self._index = model.spec.index
        self.connection = connect(model.spec.leader, tls)
        try:
            self._subscribe(leader_model, secret)
        except Exception:
            self.connection.close()
            raise
        name = f"shoal-follow-{self._index}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _subscribe(self, leader_model: int, secret: bytes) -> None:
        header = Header(FrameKind.HELLO, self._index, leader_model, secrets.randbits(63))
        authenticate(self.connection, secret, "follow", header)
        request = Follow(self._index, self._model.log.position)
        self.connection.send(header._replace(kind=FrameKind.FOLLOW), encode(request))
        answer, meta = self.connection.receive(_MAX_ENTRY_BYTES)
        if answer.kind is FrameKind.ERROR:
            raise Refused(decode(meta, ErrorReply).reason)
        _expect(answer, FrameKind.OK)

    def _run(self) -> None:
        try:
            while True:
                self._receive()
        except (Closed, Refused) as error:
            if not self._model.membership.is_over:
                self._model.fail(f"the leader was lost ({error})", is_loss=True)
        except Exception as error:
            self._model.fail(f"server {self._index} failed: {error!r}"[:4000])
        finally:
            self.connection.close()

    def _receive(self) -> None:
        header, meta = self.connection.receive(_MAX_ENTRY_BYTES)
        if header.kind is FrameKind.NORMS:
            norms = self._model.norms(decode(meta, NormsRequest).divisor)
            self.connection.send(Header(FrameKind.NORMS), encode(Norms(tuple(norms))))
        else:
            _expect(header, FrameKind.ENTRY)
            self._model.replay(decode(meta, LogEntry))


def _expect(header: Header, kind: FrameKind) -> None:
    if header.kind is not kind or header.payload_bytes:
        raise Refused(f"expected {kind.name}, got {header.kind.name}")
