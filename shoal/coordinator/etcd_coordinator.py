"""An etcd cluster as the coordinator of a run, through the JSON gateway of its version 3 API.

version of a key           its mod_revision
put_if, delete_if          a transaction that compares it
lease                      a lease of etcd, whose number the client chooses
watch                      a stream (`WatchStream`)

Changes are made once or not at all, whatever becomes of their answers. A transaction also writes
its number to a key of this client, the marker, and compares the marker's revision. Sent again
after a lost answer, it finds its number there. One that was given up is fenced before the client
goes on: the marker is moved, and a transaction that arrives after that finds another revision and
changes nothing.
"""

from __future__ import annotations

import http.client
import json
import math
import secrets
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from shoal.coordinator import (
    Answer,
    Change,
    Changes,
    Compacted,
    Conflict,
    Coordinator,
    DeleteIf,
    Grant,
    KeepAlive,
    Lease,
    LeaseLost,
    List,
    Listing,
    PutIf,
    Request,
    Unavailable,
    Watch,
)
from shoal.coordinator import etcd_gateway as etcd

_MAX_LINE_BYTES = 64 << 20
_CONNECT_S = 1.0
_PAUSE_S = 0.05
_ARRIVAL_S = 0.25  # in which changes arrive that were made before the watch began


class WatchStream(etcd.Gateway):
    """One watch at a time; a stream that breaks is opened again at another member."""

    _position: tuple[str, int] | None = None  # what is watched, and after which revision
    _response: http.client.HTTPResponse
    _is_behind = True  # changes from before it was opened have not arrived

    def changes(
        self, keys: etcd.RunKeys, name: str, after_revision: int, timeout_s: float
    ) -> Changes:
        """Those after a revision, as soon as there are some; none after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s + _CONNECT_S):
            raise Unavailable(f"another watch of {self} waits")
        try:
            return self._changes(keys, name, after_revision, deadline_s)
        finally:
            self._lock.release()

    def _changes(
        self, keys: etcd.RunKeys, name: str, after_revision: int, deadline_s: float
    ) -> Changes:
        while True:
            try:
                if self._position != (name, after_revision):
                    self._begin(keys, name, after_revision, deadline_s)
                events = self._next_events(after_revision, deadline_s)
                changes = tuple(_change(keys, event) for event in events)
                self._position = (name, changes[-1].revision)
                return Changes(changes[-1].revision, changes)
            except Compacted:
                self._drop()
                raise
            except TimeoutError:
                self.skip_member()  # this one may be cut off from the others
                self._drop()
                return Changes(after_revision)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.skip_member()
                self._drop()
                if self._is_closed or time.monotonic() + _PAUSE_S >= deadline_s:
                    reason = f"{self} does not let watch {name}: {error}"
                    raise Unavailable(reason) from error
            time.sleep(_PAUSE_S)

    def _begin(self, keys: etcd.RunKeys, name: str, after_revision: int, deadline_s: float) -> None:
        """A stream that goes on after this revision."""
        self._drop()
        self._connection = self.open(max(_CONNECT_S, deadline_s - time.monotonic()))
        create = {**keys.selection(name), "start_revision": str(after_revision + 1)}
        body = json.dumps({"create_request": create}).encode()
        self._connection.request("POST", "/v3/watch", body, etcd.HEADERS)
        self._sock = self._connection.sock  # which the connection gives to the response
        self._response = self._connection.getresponse()
        self._position = (name, after_revision)
        self._is_behind = True

    def _next_events(self, after_revision: int, deadline_s: float) -> tuple[etcd.WatchEvent, ...]:
        """TimeoutError when none has come."""
        assert self._sock is not None
        while True:
            least_s = _ARRIVAL_S if self._is_behind else 0.005
            self._sock.settimeout(max(least_s, deadline_s - time.monotonic()))
            line = self._response.readline(_MAX_LINE_BYTES)
            if not line:
                raise ConnectionError("the stream has ended")
            if line.strip():
                result = _result(line, after_revision)
                self._is_behind = result.header.revision > after_revision
                if result.events:
                    return result.events

    def _drop(self) -> None:
        if self._position is not None:
            with suppress(OSError):
                self._response.close()
        self._position = None
        super()._drop()


def _change(keys: etcd.RunKeys, event: etcd.WatchEvent) -> Change:
    kv = event.kv
    key = keys.name_of(kv.key)
    if event.type == "DELETE":
        return Change(key, None, kv.mod_revision)
    return Change(key, kv.value, kv.mod_revision, kv.lease or None)


def _result(line: bytes, after_revision: int) -> etcd.WatchResult:
    answer = etcd.parse(line, etcd.WatchAnswer)
    if answer.error is not None:
        raise ConnectionError(str(answer.error)[:200])
    if answer.result.compact_revision:
        raise Compacted.of(after_revision)
    if answer.result.canceled:
        raise ConnectionError(answer.result.cancel_reason or "the watch was cancelled")
    return answer.result


ETCD_CALL_S = 8.0
_LEASE_BITS = 62


class EtcdCoordinator(Coordinator):
    """`who` asks, for errors. Calls other than `watch` end within `call_s`.

    Leases have connections of their own: a change that waits does not delay their renewal.
    """

    def __init__(
        self,
        endpoints: Sequence[etcd.Endpoint],
        keys: etcd.RunKeys,
        who: str = "this process",
        context: ssl.SSLContext | None = None,
        call_s: float = ETCD_CALL_S,
    ):
        self._keys = keys
        self._call_s = call_s
        self._gateway = etcd.Gateway(endpoints, context, who)
        self._leases = etcd.Gateway(endpoints, context, who)
        self._watches = WatchStream(endpoints, context, who)
        self._changes = _Transactions(self._gateway, keys)

    def close(self) -> None:
        for part in (self._gateway, self._leases, self._watches):
            part.close()

    def _ask(self, request: Request) -> Answer:
        deadline_s = time.monotonic() + self._call_s
        match request:
            case Watch(name, after_revision, timeout_s):
                return self._watches.changes(self._keys, name, after_revision, timeout_s)
            case Grant(ttl_s):
                return self._grant(math.ceil(ttl_s), deadline_s)
            case KeepAlive(lease_id):
                return self._keep_alive(lease_id, deadline_s)
        with self._changes.lock:
            if isinstance(request, List):
                return self._list(request.name, deadline_s)
            if isinstance(request, DeleteIf) and request.version == 0:
                current = self._list(request.key, deadline_s).entries.get(request.key)
                raise Conflict.of(request.key, current)
            return self._changes.make(request, deadline_s)

    def _grant(self, ttl_s: int, deadline_s: float) -> Lease:
        number = secrets.randbits(_LEASE_BITS) | 1
        body = {"TTL": ttl_s, "ID": str(number)}
        try:
            answer = self._leases.post("/v3/lease/grant", body, etcd.LeaseAnswer, deadline_s)
        except etcd.EtcdError as error:
            if error.code != etcd.ALREADY_EXISTS:
                raise
            return Lease(number, float(ttl_s))  # its first answer was lost
        return Lease(answer.ID, float(answer.TTL))

    def _keep_alive(self, lease_id: int, deadline_s: float) -> float:
        body = {"ID": str(lease_id)}
        tried = self._leases.tried("/v3/lease/keepalive", body, etcd.KeepAliveAnswer, deadline_s)
        ttl_s: int = tried.answer.result.TTL
        if ttl_s <= 0:
            raise LeaseLost.of(lease_id)
        return max(0.0, ttl_s - (time.monotonic() - tried.sent_s))

    def _list(self, name: str, deadline_s: float) -> Listing:
        self._changes.settle(deadline_s)
        order = {"sort_order": "ASCEND", "sort_target": "KEY"}
        body = {**self._keys.selection(name), **order}
        found = self._gateway.post("/v3/kv/range", body, etcd.RangeAnswer, deadline_s)
        entries = {self._keys.name_of(kv.key): kv.versioned() for kv in found.kvs}
        return Listing(found.header.revision, entries)

    def remove_all(self) -> None:
        """Delete the keys of this run: at its end."""
        deadline_s = time.monotonic() + self._call_s
        self._gateway.post("/v3/kv/deleterange", self._keys.everything, etcd.Revision, deadline_s)


class _Transactions:
    """Of one client. Callers hold `lock`, also while they read what is to be final."""

    def __init__(self, gateway: etcd.Gateway, keys: etcd.RunKeys):
        self.lock = threading.Lock()
        self._gateway = gateway
        self._keys = keys
        self._marker = keys.marker(secrets.token_hex(8))
        self._marker_revision = 0
        self._number = 0
        self._is_unsettled = False  # the latest change may still be made

    def make(self, request: PutIf | DeleteIf, deadline_s: float) -> int:
        """The revision of the change; Conflict, LeaseLost."""
        name = self._keys.key(request.key)
        change: dict[str, Any] = {"request_delete_range": {"key": name}}
        if isinstance(request, PutIf):
            lease = str(request.lease_id or 0)
            put = {"key": name, "value": etcd.text_of(request.value), "lease": lease}
            change = {"request_put": put}
        try:
            return self._change(request, name, change, deadline_s)
        except etcd.EtcdError as error:
            lease_id = request.lease_id if isinstance(request, PutIf) else None
            if error.code != etcd.NOT_FOUND or lease_id is None:
                raise
        return self._made(LeaseLost.of(lease_id), deadline_s)

    def settle(self, deadline_s: float) -> None:
        """From now on the latest change was made, or never will be."""
        if self._is_unsettled:
            self._fence(deadline_s)

    def _change(
        self, request: PutIf | DeleteIf, name: str, change: object, deadline_s: float
    ) -> int:
        self.settle(deadline_s)
        self._number += 1
        self._is_unsettled = True
        body = self._transaction(name, request.version, change)
        tried = self._gateway.tried("/v3/kv/txn", body, etcd.TransactionAnswer, deadline_s)
        answer: etcd.TransactionAnswer = tried.answer
        if answer.succeeded:
            return self._settled(answer.header.revision)
        current = answer.found(0)
        marker = answer.found(1)
        if marker is not None and marker.value == self._number_text():
            return self._settled(marker.mod_revision)  # it was made by an earlier try
        has_moved = _revision(marker) != self._marker_revision
        if has_moved and _revision(current) == request.version:  # by a late fence
            if time.monotonic() >= deadline_s:
                raise Unavailable(f"{self._gateway} delays the requests of this client")
            made = self._fence(deadline_s)
            return made or self._change(request, name, change, deadline_s)
        conflict = Conflict.of(request.key, None if current is None else current.versioned())
        if tried.is_repeated or has_moved:
            return self._made(conflict, deadline_s)
        self._is_unsettled = False
        raise conflict

    def _made(self, error: Exception, deadline_s: float) -> int:
        """Where an earlier try has made the change after all; else the error, for good."""
        revision = self._fence(deadline_s)
        if revision is None:
            raise error
        return revision

    def _fence(self, deadline_s: float) -> int | None:
        """The revision at which the latest change was made; None: from now on it cannot be."""
        latest = self._number_text()
        self._number += 1
        while True:
            body = {"key": self._marker}
            found: etcd.RangeAnswer = self._gateway.post(
                "/v3/kv/range", body, etcd.RangeAnswer, deadline_s
            )
            marker = found.kvs[0] if found.kvs else None
            if marker is not None and marker.value == latest:
                return self._settled(marker.mod_revision)
            revision = self._move(_revision(marker), deadline_s)
            if revision is not None:
                self._settled(revision)
                return None

    def _move(self, at: int, deadline_s: float) -> int | None:
        """The marker's new revision, if it had not moved before."""
        marker = {"key": self._marker}
        body = {
            "compare": [_has_revision(self._marker, at)],
            "success": [{"request_put": {**marker, "value": etcd.text_of(self._number_text())}}],
            "failure": [{"request_range": marker}],
        }
        tried = self._gateway.tried("/v3/kv/txn", body, etcd.TransactionAnswer, deadline_s)
        answer: etcd.TransactionAnswer = tried.answer
        if answer.succeeded:
            return answer.header.revision
        found = answer.found(0)
        is_own = found is not None and found.value == self._number_text()
        return _revision(found) if is_own else None

    def _settled(self, revision: int) -> int:
        self._marker_revision = revision
        self._is_unsettled = False
        return revision

    def _transaction(self, name: str, version: int, change: object) -> dict[str, Any]:
        marker = {"key": self._marker}
        number = {"request_put": {**marker, "value": etcd.text_of(self._number_text())}}
        compare = [_has_revision(name, version), _has_revision(self._marker, self._marker_revision)]
        failure = [{"request_range": {"key": name}}, {"request_range": marker}]
        return {"compare": compare, "success": [change, number], "failure": failure}

    def _number_text(self) -> bytes:
        return b"%d" % self._number


def _revision(found: etcd.KeyValue | None) -> int:
    return 0 if found is None else found.mod_revision


def _has_revision(name: str, revision: int) -> dict[str, str]:
    return {"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
