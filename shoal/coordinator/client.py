"""A coordinator in another process. Connects again by itself; a request counts once.

Every request has a number. One whose answer was lost is sent again with the same number, and the
coordinator answers what it answered before. A later request settles one that was given up: from
then on the coordinator refuses it.
"""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import suppress
from typing import Any

import msgspec

from shoal.coordinator.interface import Unavailable
from shoal.coordinator.records import Answer, Request, TimeLeft, Watch
from shoal.coordinator.requester import Requester, describe
from shoal.errors import BadInput
from shoal.protocol.connection import Connection
from shoal.protocol.endpoint import PLAIN, connect
from shoal.protocol.frames import FrameKind, Header, Refused, decode, encode
from shoal.protocol.handshake import AuthenticationError, authenticate
from shoal.protocol.hello import ErrorReply
from shoal.runtime.config import TlsConfig
from shoal.runtime.waits import Backoff, waiting

CALL_S = 3.0
START_S = 30.0  # a coordinator that has not been reached before may be starting
_CLOSE_S = 1.0
_MAX_ANSWER_BYTES = 32 << 20
_answers: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer)


class RemoteCoordinator(Requester):
    """`who` asks, for errors. Calls end within `call_s`, the first one within `start_s`."""

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
        self._start_s = start_s
        self._client = secrets.randbits(62)
        self._call_s = call_s
        self._who = who
        self._sequence = 0
        self._asking = threading.Lock()
        self._watching = threading.Lock()
        self._calls = _Wire(address, secret, tls, self._client)
        self._watches = _Wire(address, secret, tls, self._client)

    def __enter__(self) -> RemoteCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Calls that wait in other threads end with Unavailable."""
        for lock, wire in ((self._asking, self._calls), (self._watching, self._watches)):
            wire.abort()
            if lock.acquire(timeout=_CLOSE_S):  # else its holder closes the connection
                wire.drop()
                lock.release()

    def _ask(self, request: Request) -> Answer:
        is_known = self._calls.has_connected or self._watches.has_connected
        allowed_s = self._call_s if is_known else max(self._start_s, self._call_s)
        if isinstance(request, Watch):
            allowed_s += request.timeout_s
            return self._locked(self._watching, self._watches, request, allowed_s)
        return self._locked(self._asking, self._calls, request, allowed_s)

    def _locked(
        self, lock: threading.Lock, wire: _Wire, request: Request, allowed_s: float
    ) -> Answer:
        deadline_s = time.monotonic() + allowed_s
        with waiting(self._who, "the coordinator", describe(request)):
            if not lock.acquire(timeout=allowed_s):
                raise self._unavailable(request, "another request waits")
            try:
                return self._exchange(wire, request, deadline_s)
            finally:
                lock.release()

    def _exchange(self, wire: _Wire, request: Request, deadline_s: float) -> Answer:
        """Send it until it is answered: a number belongs to one request."""
        self._sequence += wire is self._calls
        number = (self._sequence, 0)
        pause = Backoff(0.005, 0.1)
        while True:
            try:
                sent_s = time.monotonic()
                answer = wire.exchange(request, number, deadline_s)
                return _aged(answer, time.monotonic() - sent_s)
            except (AuthenticationError, BadInput):
                raise
            except (OSError, Refused) as error:
                if wire.is_closed or time.monotonic() >= deadline_s:
                    raise self._unavailable(request, str(error)) from error
            number = (number[0], number[1] + 1)
            pause()

    def _unavailable(self, request: Request, reason: str) -> Unavailable:
        return Unavailable(
            f"{self._who}: the coordinator at {self.address} has not answered "
            f"{describe(request)} ({reason or 'no reason'})"
        )


def _aged(answer: Answer, age_s: float) -> Answer:
    """What is left of a lease counts from before the request was sent."""
    return TimeLeft(max(0.0, answer.seconds - age_s)) if isinstance(answer, TimeLeft) else answer


class _Wire:
    """One connection that is made when it is needed; one request at a time."""

    def __init__(self, address: str, secret: bytes, tls: TlsConfig, client: int):
        self.is_closed = False
        self.has_connected = False
        self._address = address
        self._secret = secret
        self._tls = tls
        self._client = client
        self._connection: Connection | None = None
        self._changing = threading.Lock()

    def exchange(self, request: Request, number: tuple[int, int], deadline_s: float) -> Answer:
        """`number`: which request it is, and how often it was sent before."""
        connection = self._connection or self._connected(deadline_s)
        try:
            connection.sock.settimeout(_left_s(deadline_s))
            header = Header(FrameKind.COORDINATE, 0, 0, self._client, *number)
            connection.send(header, encode(request))
            return self._answer(connection, number[0])
        except BaseException:  # also Ctrl-C: an answer that comes later is not that of the next
            self.drop()
            raise

    def abort(self) -> None:
        """From any thread: the exchange that waits ends."""
        with self._changing:
            self.is_closed = True
            if self._connection is not None:
                self._connection.abort()

    def drop(self) -> None:
        """From the thread that may exchange."""
        with self._changing:
            connection = self._connection
            self._connection = None
        if connection is not None:
            with suppress(OSError):
                connection.close()

    def _answer(self, connection: Connection, sequence: int) -> Answer:
        header, meta = connection.receive(_MAX_ANSWER_BYTES)
        if header.kind is FrameKind.ERROR:
            raise Refused(decode(meta, ErrorReply).reason)
        if header.kind is not FrameKind.OK or header.sequence != sequence or header.payload_bytes:
            raise Refused("the coordinator's answer belongs to no request")
        try:
            answer: Answer = _answers.decode(meta)
        except (msgspec.MsgspecError, ValueError) as error:
            raise Refused(f"the coordinator's answer cannot be read: {error}") from error
        return answer

    def _connected(self, deadline_s: float) -> Connection:
        if self.is_closed:
            raise ConnectionError("it is closed")
        connection = connect(self._address, self._tls, _left_s(deadline_s))
        with self._changing:
            self._connection = connection
            if self.is_closed:
                connection.abort()
        try:
            connection.sock.settimeout(_left_s(deadline_s))
            header = Header(FrameKind.HELLO, incarnation=self._client)
            authenticate(connection, self._secret, "coordinator", header)
        except BaseException:
            self.drop()
            raise
        self.has_connected = True
        return connection


def _left_s(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())
