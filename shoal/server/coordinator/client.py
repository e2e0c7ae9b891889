"""A coordinator in another process. Connects again by itself; a request counts once.

Every request has a number. One whose answer was lost is sent again with the same number, and the
coordinator answers what it answered before. A later request settles one that was given up: from
then on the coordinator refuses it.
"""

from __future__ import annotations

import itertools
import secrets
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import msgspec

from shoal.comm.transport.tcp.tls import own_context
from shoal.errors import BadInput
from shoal.runtime import clock
from shoal.runtime.config import RunConfig, TlsConfig
from shoal.runtime.variable_text import MIN_LEASE_S
from shoal.runtime.waits import Backoff, waiting
from shoal.server import coordinator
from shoal.server.coordinator.etcd_coordinator import ETCD_CALL_S, EtcdCoordinator
from shoal.server.coordinator.etcd_gateway import RunKeys, check_trusted, is_etcd, parse_endpoints
from shoal.server.protocol import ErrorReply, FrameKind, Header, Refused, decode, encode
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.endpoint import PLAIN, connect
from shoal.server.protocol.handshake import authenticate

CALL_S = 3.0
START_S = 30.0  # a coordinator that has not been reached before may be starting
_CLOSE_S = 1.0
_MAX_ANSWER_BYTES = 32 << 20
_answers: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(coordinator.Answer)


class RemoteCoordinator(coordinator.Coordinator):
    """`who` asks, for errors. Calls end within `call_s`, the first one within `start_s`.

    There is one connection, made when it is needed; one request at a time.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        who: str = "this process",
        tls: TlsConfig = PLAIN,
        call_s: float = CALL_S,
        start_s: float = START_S,
    ):
        self.address = address
        self._secret = secret
        self._who = who
        self._tls = tls
        self._call_s = call_s
        self._allowed_s = max(start_s, call_s)  # until it has been reached
        self._client = secrets.randbits(62)
        self._sequence = 0
        self._connection: Connection | None = None
        self._is_closed = False
        self._asking = clock.Lock()
        self._changing = clock.Lock()

    def close(self) -> None:
        """From any thread: the exchange that waits ends."""
        with self._changing:
            self._is_closed = True
            if self._connection is not None:
                self._connection.abort()
        if self._asking.acquire(timeout=_CLOSE_S):  # else its holder closes the connection
            self._drop()
            self._asking.release()

    def _ask(self, request: coordinator.Request) -> coordinator.Answer:
        what = coordinator.describe(request)
        try:
            with waiting(self._who, "the coordinator", what):
                return self._until_answered(request, clock.monotonic() + self._allowed_s)
        except (OSError, Refused) as error:
            raise coordinator.Unavailable(
                f"{self._who}: the coordinator at {self.address} has not answered {what} "
                f"({error or 'no reason'})"
            ) from error

    def _until_answered(
        self, request: coordinator.Request, deadline_s: float
    ) -> coordinator.Answer:
        """Send it until it is answered: a number belongs to one request."""
        if not self._asking.acquire(timeout=_left_s(deadline_s)):
            raise TimeoutError("another request waits")
        try:
            self._sequence += 1
            pause = Backoff(0.005, 0.1)
            for attempt in itertools.count():
                sent_s = clock.monotonic()
                try:
                    answer = self._exchange(request, attempt, deadline_s)
                    break
                except (OSError, Refused):
                    if self._is_closed or clock.monotonic() >= deadline_s:
                        raise
                pause()
        finally:
            self._asking.release()
        if isinstance(answer, float):  # what is left of a lease counts from before it was asked for
            return max(0.0, answer - (clock.monotonic() - sent_s))
        return answer

    def _exchange(
        self, request: coordinator.Request, attempt: int, deadline_s: float
    ) -> coordinator.Answer:
        try:
            connection = self._connection or self._connected(deadline_s)
            connection.sock.settimeout(_left_s(deadline_s))
            number = self._sequence
            header = Header(FrameKind.COORDINATE, 0, 0, self._client, number, attempt)
            connection.send(header, encode(request))
            answer, meta = connection.receive(_MAX_ANSWER_BYTES)
            if answer.kind is FrameKind.ERROR:
                raise Refused(decode(meta, ErrorReply).reason)
            if answer.kind is not FrameKind.OK or answer.sequence != number:
                raise Refused("the coordinator's answer belongs to no request")
            decoded: coordinator.Answer = _answers.decode(meta)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._drop()
            raise Refused(f"the coordinator's answer cannot be read: {error}") from error
        except BaseException:  # also Ctrl-C: an answer that comes later is not that of the next
            self._drop()
            raise
        return decoded

    def _connected(self, deadline_s: float) -> Connection:
        if self._is_closed:
            raise ConnectionError("it is closed")
        connection = connect(self.address, self._tls, _left_s(deadline_s))
        with self._changing:
            self._connection = connection
            if self._is_closed:
                connection.abort()
        connection.sock.settimeout(_left_s(deadline_s))
        header = Header(FrameKind.HELLO, incarnation=self._client)
        authenticate(connection, self._secret, "coordinator", header)
        self._allowed_s = self._call_s
        return connection

    def _drop(self) -> None:
        """From the thread that may exchange."""
        with self._changing:
            connection = self._connection
            self._connection = None
        if connection is not None:
            with suppress(OSError):
                connection.close()


def _left_s(deadline_s: float) -> float:
    return max(0.001, deadline_s - clock.monotonic())


LEASE_TTL_S = MIN_LEASE_S  # of servers, with the launcher's coordinator
ETCD_LEASE_TTL_S = 2.0  # the shortest that etcd grants


def open_coordinator(
    config: RunConfig, who: str = "this process", call_s: float | None = None
) -> coordinator.Coordinator:
    """A client of `config.coordinator`; `who` asks, for errors. It connects when it is used."""
    address = config.coordinator
    if address is None:
        raise BadInput("there is no coordinator: SHOAL_COORDINATOR is not set")
    secret = config.read_secret()
    if secret is None:
        raise BadInput("the coordinator needs the secret of this run: set SHOAL_SECRET")
    if is_etcd(address):
        return open_etcd(config, address, secret, who, call_s or ETCD_CALL_S)
    return RemoteCoordinator(address, secret, who, config.tls, call_s or CALL_S)


def open_etcd(
    config: RunConfig, address: str, secret: bytes, who: str, call_s: float = ETCD_CALL_S
) -> EtcdCoordinator:
    endpoints = parse_endpoints(address)
    context = None
    if address.startswith("etcds:"):
        context = own_context(config.etcd, ssl.PROTOCOL_TLS_CLIENT, "SHOAL_ETCD")
    else:
        check_trusted(endpoints, config.tls.trusted_network)
    return EtcdCoordinator(endpoints, RunKeys(secret), who, context, call_s)


@contextmanager
def own_keys(config: RunConfig, who: str) -> Iterator[None]:
    """Keys of this run in an etcd cluster of the user: a run with the same secret has left none,
    and none is left at the end of the block."""
    etcd = open_coordinator(config, who)
    assert isinstance(etcd, EtcdCoordinator)
    with closing(etcd):
        try:
            etcd.remove_all()
        except coordinator.CoordinatorError as error:
            raise BadInput(f"SHOAL_COORDINATOR is {config.coordinator}: {error}") from error
        try:
            yield
        finally:
            with suppress(coordinator.CoordinatorError):
                etcd.remove_all()


def lease_ttl_s(config: RunConfig) -> float:
    """How long a server's lease lasts without being renewed."""
    least_s = ETCD_LEASE_TTL_S if is_etcd(config.coordinator or "") else LEASE_TTL_S
    return max(least_s, config.lease_s or 0.0)
