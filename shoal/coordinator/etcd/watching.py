"""Changes of keys, from a stream of etcd that stays open from one call to the next."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from shoal.coordinator.etcd.gateway import (
    HEADERS,
    Gateway,
    RunKeys,
    WatchAnswer,
    WatchEvent,
    WatchResult,
    parse,
)
from shoal.coordinator.interface import Change, Changes, Compacted, Unavailable

_MAX_LINE_BYTES = 64 << 20
_CONNECT_S = 1.0
_PAUSE_S = 0.05
_ARRIVAL_S = 0.25  # in which changes arrive that were made before the watch began


@dataclass
class _Stream:
    name: str
    after_revision: int
    connection: http.client.HTTPConnection
    sock: socket.socket
    response: http.client.HTTPResponse
    is_behind: bool = True

    def close(self) -> None:
        with suppress(OSError):
            self.response.close()
        self.connection.close()


class WatchStream:
    """One watch at a time; a stream that breaks is opened again at another member."""

    def __init__(self, gateway: Gateway, keys: RunKeys):
        self._gateway = gateway
        self._keys = keys
        self._lock = threading.Lock()
        self._stream: _Stream | None = None
        self._is_closed = False

    def changes(self, name: str, after_revision: int, timeout_s: float) -> Changes:
        """Those after a revision, as soon as there are some; none after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s + _CONNECT_S):
            raise Unavailable(f"another watch of {self._gateway} waits")
        try:
            return self._changes(name, after_revision, deadline_s)
        finally:
            self._lock.release()

    def close(self) -> None:
        self._is_closed = True
        self._gateway.close()
        stream = self._stream
        if stream is not None:
            with suppress(OSError):
                socket.socket.shutdown(stream.sock, socket.SHUT_RDWR)
        if self._lock.acquire(timeout=1.0):
            self._drop()
            self._lock.release()

    def _changes(self, name: str, after_revision: int, deadline_s: float) -> Changes:
        while True:
            try:
                return self._arrived(self._next_events(name, after_revision, deadline_s))
            except Compacted:
                self._drop()
                raise
            except TimeoutError:
                self._gateway.skip_member()  # this one may be cut off from the others
                self._drop()
                return Changes(after_revision)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._gateway.skip_member()
                self._drop()
                if self._is_closed or time.monotonic() + _PAUSE_S >= deadline_s:
                    reason = f"{self._gateway} does not let watch {name}: {error}"
                    raise Unavailable(reason) from error
            time.sleep(_PAUSE_S)

    def _arrived(self, events: tuple[WatchEvent, ...]) -> Changes:
        changes = tuple(self._change(event) for event in events)
        assert self._stream is not None
        self._stream.after_revision = changes[-1].revision
        return Changes(changes[-1].revision, changes)

    def _next_events(
        self, name: str, after_revision: int, deadline_s: float
    ) -> tuple[WatchEvent, ...]:
        """TimeoutError when none has come."""
        stream = self._at(name, after_revision, deadline_s)
        while True:
            least_s = _ARRIVAL_S if stream.is_behind else 0.005
            stream.sock.settimeout(max(least_s, deadline_s - time.monotonic()))
            line = stream.response.readline(_MAX_LINE_BYTES)
            if not line:
                raise ConnectionError("the stream has ended")
            if line.strip():
                result = _result(line, after_revision)
                stream.is_behind = result.header.revision > after_revision
                if result.events:
                    return result.events

    def _at(self, name: str, after_revision: int, deadline_s: float) -> _Stream:
        """The stream that goes on after this revision."""
        stream = self._stream
        if stream is not None and (stream.name, stream.after_revision) == (name, after_revision):
            return stream
        self._drop()
        connection = self._gateway.open(max(_CONNECT_S, deadline_s - time.monotonic()))
        create = {**self._keys.selection(name), "start_revision": str(after_revision + 1)}
        body = json.dumps({"create_request": create}).encode()
        try:
            connection.request("POST", "/v3/watch", body, HEADERS)
            sock = connection.sock
            response = connection.getresponse()
        except BaseException:
            connection.close()
            raise
        self._stream = _Stream(name, after_revision, connection, sock, response)
        return self._stream

    def _change(self, event: WatchEvent) -> Change:
        kv = event.kv
        key = self._keys.name_of(kv.key)
        if event.type == "DELETE":
            return Change(key, None, kv.mod_revision)
        return Change(key, kv.value, kv.mod_revision, kv.lease or None)

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _result(line: bytes, after_revision: int) -> WatchResult:
    answer = parse(line, WatchAnswer)
    if answer.error is not None:
        raise ConnectionError(str(answer.error)[:200])
    if answer.result.compact_revision:
        raise Compacted.of(after_revision)
    if answer.result.canceled:
        raise ConnectionError(answer.result.cancel_reason or "the watch was cancelled")
    return answer.result
