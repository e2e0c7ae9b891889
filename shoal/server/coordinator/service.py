"""Serves a coordinator to other processes: a thread for each connection.

Both sides prove the run's secret first. Every frame is checked before anything follows from it;
one that is not a request ends its connection, and nothing else.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

import msgspec

from shoal.runtime import clock
from shoal.runtime.config import TlsConfig
from shoal.runtime.waits import Periodic
from shoal.server.coordinator import (
    MAX_NUMBER,
    Answer,
    CoordinatorError,
    Failed,
    Grant,
    KeepAlive,
    LeaseLost,
    List,
    Mutation,
    Outcome,
    PutIf,
    Request,
    Unavailable,
    requests,
)
from shoal.server.coordinator.store import MAX_CLIENTS, RequestId, Store
from shoal.server.coordinator.store_file import OutcomeUnknown, StoreFile
from shoal.server.protocol import FrameKind, Header, Hello, Refused, encode
from shoal.server.protocol.connection import Closed, Connection
from shoal.server.protocol.endpoint import PLAIN
from shoal.server.protocol.service import JOIN_S, ConnectionService

LONGEST_TICK_S = 0.1


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

    def __init__(self, file: StoreFile | None = None, clock_s: Callable[[], float] | None = None):
        """Without a file the store is in memory alone."""
        self._file = file
        self._clock_s = clock_s or LeaseClock().now_s
        self._changing = clock.Lock()
        self._seen: OrderedDict[int, tuple[int, int]] = OrderedDict()  # of each client: the latest
        self._ends_s: dict[int, float] = {}  # of each lease
        self._is_closed = False
        self._take(Store() if file is None else file.store)

    def answer(self, request: Request, by: RequestId | None = None) -> Answer:
        """The answer to one request; to the same request again, the same one."""
        try:
            with self._changing:
                self._expire()
                return self._answer(request, by)
        except CoordinatorError as error:
            return Failed(type(error).__name__, str(error))

    def tick(self) -> None:
        """End the leases whose time is over."""
        with self._changing:
            self._expire()

    def close(self) -> None:
        with self._changing:
            self._is_closed = True
            if self._file is not None:
                self._file.close()

    # ------------------------------------------------------------------ under the lock

    def _answer(self, request: Request, by: RequestId | None) -> Answer:
        if by is not None and not self._is_latest(by):
            raise Unavailable("this client has sent another request since")
        if isinstance(request, List):
            return self._store.list(request.name)
        if isinstance(request, KeepAlive):
            ttl_s = self._lease(request.lease_id).ttl_s
            self._ends_s[request.lease_id] = self._clock_s() + ttl_s
            return ttl_s
        return self._mutate(request, by)

    def _is_latest(self, by: RequestId) -> bool:
        """What its client has given up or sent again since, and arrives late, changes nothing."""
        this = (by.sequence, by.attempt)
        latest = self._seen.pop(by.client, this)
        self._seen[by.client] = max(latest, this)
        if len(self._seen) > MAX_CLIENTS:
            self._seen.popitem(last=False)
        return this >= latest

    def _lease(self, lease_id: int) -> Grant:
        if self._ends_s.get(lease_id, -math.inf) <= self._clock_s():
            raise LeaseLost.of(lease_id)
        return self._store.leases[lease_id]

    def _mutate(self, request: Mutation, by: RequestId | None) -> Outcome:
        known = None if by is None else self._store.outcome(by)
        if known is not None:
            return known
        if self._is_closed:
            raise Unavailable("the coordinator ends")
        if isinstance(request, PutIf) and request.lease_id is not None:
            self._lease(request.lease_id)
        store, outcome = self._store.after(request, by)
        try:
            self._keep(store)
        except OutcomeUnknown:
            raise
        except OSError as error:
            reason = f"the coordinator could not write its store ({error.strerror})"
            raise Unavailable(f"{reason}: nothing was changed; make room for it") from error
        return outcome

    def _keep(self, store: Store) -> None:
        if self._file is not None:
            self._file.write(store)
        self._take(store)

    def _take(self, store: Store) -> None:
        """Leases that are new here have their whole time."""
        now_s = self._clock_s()
        held = store.leases.items()
        self._ends_s = {n: self._ends_s.get(n, now_s + lease.ttl_s) for n, lease in held}
        self._store = store

    def _expire(self) -> None:
        now_s = self._clock_s()
        ended = {lease_id for lease_id, end_s in self._ends_s.items() if end_s <= now_s}
        if ended and not self._is_closed:
            with suppress(OSError):  # tried again at the next request or tick
                self._keep(self._store.without(ended))


MAX_REQUEST_BYTES = 96 << 10
_SEND_S = 10.0  # a client that takes no answer for so long is disconnected
_TICK_S = 0.03


class CoordinatorService(ConnectionService):
    """Listens at its addresses until it is closed."""

    def __init__(self, core: Core, secret: bytes, addresses: list[str], tls: TlsConfig = PLAIN):
        super().__init__(secret, addresses, tls)
        self.addresses = [listener.address for listener in self.listeners]
        self._core = core
        self._ticking = Periodic("shoal-leases", _TICK_S, core.tick)
        self._ticking.start()
        self.start()

    def close(self) -> None:
        self.stop_listening()
        self._core.close()
        self.end_connections()
        self._ticking.close(JOIN_S)

    def serve(self, connection: Connection, hello: Hello, header: Header, number: int) -> None:
        if hello.channel != "coordinator":
            raise Refused(f"this is the coordinator: it has no {hello.channel} connections")
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
        except OutcomeUnknown as error:
            raise Refused(f"the coordinator cannot write its store: {error.strerror}") from error
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Refused(f"not a request to a coordinator: {error}") from error
        connection.sock.settimeout(_SEND_S)
        connection.send(Header(FrameKind.OK, sequence=header.sequence), encode(answer))
        connection.sock.settimeout(None)
