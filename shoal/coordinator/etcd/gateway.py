"""HTTP requests to the members of an etcd cluster: the next member where one does not answer.

A request that was not answered may have been carried out: `Tried.is_repeated`.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from shoal.coordinator.etcd.answers import UNCERTAIN, EtcdError, error_of, parse
from shoal.coordinator.etcd.endpoints import Endpoint
from shoal.coordinator.interface import Unavailable

T = TypeVar("T")
FIRST_TRY_S = 0.5  # of each member; then twice as long, until the call has to end
_LONGEST_TRY_S = 4.0
_PAUSE_S = 0.03
_MAX_ANSWER_BYTES = 64 << 20
_HEADERS = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}


class Tried(NamedTuple):
    """An answer, and whether the request may also have been carried out before."""

    answer: Any
    is_repeated: bool
    sent_s: float  # when the request that was answered was sent


class Gateway:
    """One request at a time, over one connection that is kept."""

    def __init__(self, endpoints: Sequence[Endpoint], context: ssl.SSLContext | None, who: str):
        self._endpoints = list(endpoints)
        self._context = context
        self._who = who
        self._at = 0
        self._connection: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def post(self, path: str, body: object, kind: type[T], deadline_s: float) -> T:
        answer: T = self.tried(path, body, kind, deadline_s).answer
        return answer

    def tried(self, path: str, body: object, kind: type[T], deadline_s: float) -> Tried:
        """Unavailable when no member has answered in time; EtcdError when one has refused it."""
        data = json.dumps(body).encode()
        if not self._lock.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise Unavailable(f"{self._who}: another request to {self} waits")
        try:
            return self._until_answered(path, data, kind, deadline_s)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Ends the request that waits, if one does."""
        self._is_closed = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(2)
        if self._lock.acquire(timeout=1.0):
            self._drop()
            self._lock.release()

    def __str__(self) -> str:
        return f"etcd at {', '.join(map(str, self._endpoints))}"

    def _until_answered(self, path: str, data: bytes, kind: type[T], deadline_s: float) -> Tried:
        tries = 0
        while True:
            try_s = FIRST_TRY_S * 2 ** (tries // len(self._endpoints))
            sent_s = time.monotonic()
            try:
                answer = self._try(path, data, min(try_s, _LONGEST_TRY_S, deadline_s - sent_s))
                return Tried(parse(answer, kind), tries > 0, sent_s)
            except EtcdError as error:
                if error.code not in UNCERTAIN:
                    raise
                reason = str(error)
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = str(error) or type(error).__name__
            tries += 1
            self._next()
            if self._is_closed or time.monotonic() + _PAUSE_S >= deadline_s:
                raise Unavailable(f"{self._who}: {self} has not answered {path} ({reason})")
            time.sleep(_PAUSE_S)

    def _try(self, path: str, data: bytes, timeout_s: float) -> bytes:
        connection = self._connection or self.open(timeout_s)
        self._connection = connection
        connection.timeout = max(0.01, timeout_s)
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        connection.request("POST", path, data, _HEADERS)
        response = connection.getresponse()
        answer = response.read(_MAX_ANSWER_BYTES)
        if response.status != 200:
            raise error_of(response.status, answer)
        return answer

    def open(self, timeout_s: float) -> http.client.HTTPConnection:
        """To the member that answered last, or the next one; it connects when it is used."""
        if self._is_closed:
            raise ConnectionError("it is closed")
        host, port = self._endpoints[self._at % len(self._endpoints)]
        if self._context is None:
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._context)

    def _next(self) -> None:
        self._drop()
        self.skip_member()

    def skip_member(self) -> None:
        self._at += 1

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def stream_headers() -> dict[str, str]:
    return dict(_HEADERS)
