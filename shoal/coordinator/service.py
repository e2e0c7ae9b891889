"""Serves a coordinator to other processes: a thread for each connection.

Both sides prove the run's secret first. Every frame is checked before anything follows from it;
one that is not a request ends its connection, and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

import msgspec

from shoal.coordinator import (
    MAX_NUMBER,
    Answer,
    Changes,
    CoordinatorError,
    Failed,
    KeepAlive,
    List,
    Mutation,
    Outcome,
    Request,
    Unavailable,
    Watch,
    requests,
)
from shoal.coordinator.log import LogBroken, StoreLog
from shoal.coordinator.store import MAX_CLIENTS, Expired, Record, RequestId, Store
from shoal.protocol import FrameKind, Header, Hello, Refused, encode
from shoal.protocol.connection import Closed, Connection
from shoal.protocol.endpoint import PLAIN
from shoal.protocol.service import JOIN_S, ConnectionService
from shoal.runtime import clock
from shoal.runtime.acceptor import service_thread
from shoal.runtime.config import TlsConfig

LONGEST_TICK_S = 0.1
_MAX_WATCHED_BYTES = 4 << 20


class LeaseClock:
    """Advances with time, but by little where it was not looked at for long.

    So no lease ends because the coordinator was stopped, waited for its disk, or got no core: its
    holders could not renew it then. A lease that lasts longer is harmless.
    """

    def __init__(self, clock_s: Callable[[], float] | None = None):
        self._clock_s = clock_s or clock.monotonic
        self._seen_s = self._clock_s()
        self._now_s = 0.0

    def now_s(self) -> float:
        seen_s = self._clock_s()
        self._now_s += min(max(0.0, seen_s - self._seen_s), LONGEST_TICK_S)
        self._seen_s = seen_s
        return self._now_s


class Core:
    """Answers requests of all clients, one at a time."""

    def __init__(
        self, store: Store, log: StoreLog | None = None, clock_s: Callable[[], float] | None = None
    ):
        self._store = store
        self._log = log
        self._clock_s = clock_s or LeaseClock().now_s
        self._changed = clock.Condition()
        self._seen: OrderedDict[int, tuple[int, int]] = OrderedDict()  # of each client: the latest
        self._is_closed = False

    def answer(self, request: Request, by: RequestId | None = None) -> Answer:
        """The answer to one request; to the same request again, the same one."""
        try:
            if isinstance(request, Watch):
                return self._watch(request)
            with self._changed:
                self._expire()
                return self._answer(request, by)
        except CoordinatorError as error:
            return Failed(type(error).__name__, str(error), error.current)

    def tick(self) -> None:
        """End the leases whose time is over."""
        with self._changed:
            self._expire()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            if self._log is not None:
                self._log.close()

    # ------------------------------------------------------------------ under the lock

    def _answer(self, request: Mutation | KeepAlive | List, by: RequestId | None) -> Answer:
        if by is not None and not self._is_latest(by):
            raise Unavailable("this client has sent another request since")
        if isinstance(request, List):
            return self._store.list(request.name)
        if isinstance(request, KeepAlive):
            return self._store.renew(request.lease_id, self._clock_s())
        return self._mutate(request, by)

    def _is_latest(self, by: RequestId) -> bool:
        """What its client has given up or sent again since, and arrives late, changes nothing."""
        this = (by.sequence, by.attempt)
        latest = self._seen.pop(by.client, this)
        self._seen[by.client] = max(latest, this)
        if len(self._seen) > MAX_CLIENTS:
            self._seen.popitem(last=False)
        return this >= latest

    def _mutate(self, request: Mutation, by: RequestId | None) -> Outcome:
        known = None if by is None else self._store.outcome(by)
        if known is not None:
            return known
        self._store.check(request, self._clock_s())
        try:
            return self._carry_out(request, by)
        except LogBroken:
            raise
        except OSError as error:
            reason = f"the coordinator could not write its log ({error.strerror})"
            raise Unavailable(f"{reason}: nothing was changed; make room for it") from error

    def _carry_out(self, change: Mutation | Expired, by: RequestId | None) -> Outcome:
        record = Record(self._store.index + 1, change, by)
        if self._log is not None:
            self._log.append(record, self._store.image)
        outcome = self._store.apply(record, self._clock_s())
        if self._log is not None:
            self._log.compact_if_due(self._store.image)
        self._changed.notify_all()
        return outcome

    def _expire(self) -> None:
        expired = self._store.expired(self._clock_s())
        if expired is None or self._is_closed:
            return
        with suppress(OSError):  # tried again at the next request or tick
            self._carry_out(expired, None)

    # ------------------------------------------------------------------ waiting

    def _watch(self, request: Watch) -> Changes:
        deadline_s = clock.monotonic() + request.timeout_s
        with self._changed:
            while True:
                self._expire()
                found = self._store.changes(request.name, request.after_revision)
                left_s = deadline_s - clock.monotonic()
                if found.changes or left_s <= 0 or self._is_closed:
                    return _limited(found)
                self._changed.wait(min(left_s, LONGEST_TICK_S))


def _limited(found: Changes) -> Changes:
    """As many changes as fit an answer; the rest comes with the next one."""
    size = 0
    for count, change in enumerate(found.changes):
        size += len(change.key) + len(change.value or b"")
        if size > _MAX_WATCHED_BYTES and count:
            kept = found.changes[:count]
            return Changes(kept[-1].revision, kept)
    return found


MAX_REQUEST_BYTES = 96 << 10
_SEND_S = 10.0  # a client that takes no answer for so long is disconnected
_TICK_S = 0.03


class CoordinatorService(ConnectionService):
    """Listens at its addresses until it is closed."""

    def __init__(self, core: Core, secret: bytes, addresses: list[str], tls: TlsConfig = PLAIN):
        super().__init__(secret, addresses, tls)
        self.addresses = [listener.address for listener in self.listeners]
        self._core = core
        self._ticking = service_thread("shoal-leases", self._tick)
        self._ticking.start()
        self.start()

    def close(self) -> None:
        self.stop_listening()
        self._core.close()
        self.end_connections()
        self._ticking.join(JOIN_S)

    def _tick(self) -> None:
        while not self.closed.wait(_TICK_S):
            self._core.tick()

    def serve(self, connection: Connection, hello: Hello, header: Header, number: int) -> None:
        if hello.channel != "coordinator":
            raise Refused(f"this is the coordinator: it has no {hello.channel} connections")
        with self.lock:
            self.connections.add(connection)
        with suppress(Closed):
            while not self.closed.is_set():
                self._serve_one(connection, header.incarnation)

    def _serve_one(self, connection: Connection, client: int) -> None:
        header, meta = connection.receive(MAX_REQUEST_BYTES)
        if header.kind is not FrameKind.COORDINATE or header.payload_bytes:
            raise Refused(f"{header.kind.name} is no request to a coordinator")
        by = RequestId(client, header.sequence, header.argument)
        if header.incarnation != client or max(client, by.sequence, by.attempt) > MAX_NUMBER:
            raise Refused("a request of another client")
        try:
            answer = self._core.answer(requests.decode(meta), by)
        except LogBroken as error:
            raise Refused(f"the coordinator cannot write its log: {error.strerror}") from error
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Refused(f"not a request to a coordinator: {error}") from error
        connection.sock.settimeout(_SEND_S)
        connection.send(Header(FrameKind.OK, sequence=header.sequence), encode(answer))
        connection.sock.settimeout(None)
