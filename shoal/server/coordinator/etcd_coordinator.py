"""An etcd cluster as the coordinator of a run, through the JSON gateway of its version 3 API.

version of a key           its mod_revision
put_if, delete_if          a transaction that compares it
lease                      a lease of etcd, whose number the client chooses

Changes are made once or not at all, whatever becomes of their answers. A transaction also writes
its number to a key of this client, the marker, and compares the marker's revision. Sent again
after a lost answer, it finds its number there. One that was given up is fenced before the client
goes on: the marker is moved, and a transaction that arrives after that finds another revision and
changes nothing.
"""

from __future__ import annotations

import math
import secrets
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any

from shoal.server.coordinator import (
    Answer,
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
)
from shoal.server.coordinator import etcd_gateway as etcd

ETCD_CALL_S = 8.0
_LEASE_BITS = 62


class EtcdCoordinator(Coordinator):
    """`who` asks, for errors. Calls end within `call_s`.

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
        self._changes = _Transactions(self._gateway, keys)

    def close(self) -> None:
        self._gateway.close()
        self._leases.close()

    def _ask(self, request: Request) -> Answer:
        deadline_s = time.monotonic() + self._call_s
        match request:
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
        return Listing(entries)

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
