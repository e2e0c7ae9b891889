"""An etcd cluster as the coordinator of a run.

version of a key           its mod_revision
put_if, delete_if          a transaction that compares it (transactions.py)
lease                      a lease of etcd, whose number the client chooses
watch                      a stream (watching.py)
"""

from __future__ import annotations

import math
import secrets
import ssl
import time
from collections.abc import Sequence
from typing import Any

from shoal.coordinator.etcd.answers import (
    ALREADY_EXISTS,
    NOT_FOUND,
    Anything,
    EtcdError,
    KeepAliveAnswer,
    LeaseAnswer,
    RangeAnswer,
)
from shoal.coordinator.etcd.gateway import Endpoint, Gateway, RunKeys, text_of
from shoal.coordinator.etcd.transactions import Transactions
from shoal.coordinator.etcd.watching import WatchStream
from shoal.coordinator.interface import (
    WATCH_S,
    Changes,
    Conflict,
    Lease,
    LeaseLost,
    Listing,
    Versioned,
)
from shoal.coordinator.records import DeleteIf, Get, Grant, KeepAlive, List, PutIf, Revoke, Watch
from shoal.coordinator.requester import check_request, leased

ETCD_CALL_S = 8.0
_LEASE_BITS = 62


class EtcdCoordinator:
    """`who` asks, for errors. Calls other than `watch` end within `call_s`.

    Leases have connections of their own: a change that waits does not delay their renewal.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        keys: RunKeys,
        who: str = "this process",
        context: ssl.SSLContext | None = None,
        call_s: float = ETCD_CALL_S,
    ):
        self._keys = keys
        self._call_s = call_s
        self._gateway = Gateway(endpoints, context, who)
        self._leases = Gateway(endpoints, context, who)
        self._watches = WatchStream(Gateway(endpoints, context, who), keys)
        self._changes = Transactions(self._gateway, keys)

    def __enter__(self) -> EtcdCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for part in (self._gateway, self._leases, self._watches):
            part.close()

    # ------------------------------------------------------------------ leases

    def grant(self, ttl_s: float, holder: str) -> Lease:
        check_request(Grant(ttl_s, holder))
        number = secrets.randbits(_LEASE_BITS) | 1
        body = {"TTL": math.ceil(ttl_s), "ID": str(number)}
        try:
            answer = self._leases.post("/v3/lease/grant", body, LeaseAnswer, self._deadline_s())
        except EtcdError as error:
            if error.code != ALREADY_EXISTS:
                raise
            return Lease(number, float(math.ceil(ttl_s)))  # its first answer was lost
        return Lease(answer.ID, float(answer.TTL))

    def keep_alive(self, lease_id: int) -> float:
        check_request(KeepAlive(lease_id))
        body = {"ID": str(lease_id)}
        tried = self._leases.tried("/v3/lease/keepalive", body, KeepAliveAnswer, self._deadline_s())
        ttl_s: int = tried.answer.result.TTL
        if ttl_s <= 0:
            raise LeaseLost(lease_id)
        return max(0.0, ttl_s - (time.monotonic() - tried.sent_s))

    def revoke(self, lease_id: int) -> None:
        check_request(Revoke(lease_id))
        body = {"ID": str(lease_id)}
        try:
            self._leases.post("/v3/lease/revoke", body, Anything, self._deadline_s())
        except EtcdError as error:
            if error.code != NOT_FOUND:
                raise

    # ------------------------------------------------------------------ reading

    def get(self, key: str) -> Versioned | None:
        check_request(Get(key))
        found = self._range({"key": text_of(self._keys.key(key))})
        return found.kvs[0].versioned() if found.kvs else None

    def list(self, name: str) -> Listing:
        check_request(List(name))
        order = {"sort_order": "ASCEND", "sort_target": "KEY"}
        found = self._range({**self._keys.selection(name), **order})
        entries = {self._keys.name_of(kv.key): kv.versioned() for kv in found.kvs}
        return Listing(found.header.revision, entries)

    def live(self, name: str) -> dict[str, Versioned]:
        return leased(self.list(name))

    def watch(self, name: str, after_revision: int, timeout_s: float = WATCH_S) -> Changes:
        check_request(Watch(name, after_revision, float(timeout_s)))
        return self._watches.changes(name, after_revision, timeout_s)

    def _range(self, body: dict[str, Any]) -> RangeAnswer:
        deadline_s = self._deadline_s()
        with self._changes.lock:
            self._changes.settle(deadline_s)
            return self._gateway.post("/v3/kv/range", body, RangeAnswer, deadline_s)

    # ------------------------------------------------------------------ changes

    def put_if(
        self, key: str, value: bytes, version: int, lease_id: int | None = None
    ) -> Versioned:
        check_request(PutIf(key, value, version, lease_id))
        with self._changes.lock:
            revision = self._changes.put(key, value, version, lease_id, self._deadline_s())
        return Versioned(value, revision, lease_id)

    def delete_if(self, key: str, version: int) -> int:
        check_request(DeleteIf(key, version))
        if version == 0:
            raise Conflict(key, self.get(key))
        with self._changes.lock:
            return self._changes.delete(key, version, self._deadline_s())

    def remove_all(self) -> None:
        """Delete the keys of this run: at its end."""
        body = self._keys.everything
        self._gateway.post("/v3/kv/deleterange", body, Anything, self._deadline_s())

    def _deadline_s(self) -> float:
        return time.monotonic() + self._call_s
