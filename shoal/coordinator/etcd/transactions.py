"""Changes by compare-and-set, each made once or not at all, whatever becomes of its answer.

A transaction also writes its number to a key of this client, the marker, and compares the
marker's revision. Sent again after a lost answer, it finds its number there. One that was given
up is fenced before the client goes on: the marker is moved, and a transaction that arrives after
that finds another revision and changes nothing.
"""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any

from shoal.coordinator.etcd.answers import (
    NOT_FOUND,
    EtcdError,
    KeyValue,
    RangeAnswer,
    TransactionAnswer,
)
from shoal.coordinator.etcd.gateway import Gateway, RunKeys, text_of
from shoal.coordinator.interface import Conflict, LeaseLost, Unavailable


class Transactions:
    """Of one client. Callers hold `lock`, also while they read what is to be final."""

    def __init__(self, gateway: Gateway, keys: RunKeys):
        self.lock = threading.RLock()
        self._gateway = gateway
        self._keys = keys
        self._marker = text_of(keys.marker(secrets.token_hex(8)))
        self._marker_revision = 0
        self._number = 0
        self._is_unsettled = False  # the latest change may still be made

    def put(
        self, key: str, value: bytes, version: int, lease_id: int | None, deadline_s: float
    ) -> int:
        """The revision of the change; Conflict, LeaseLost."""
        put = {"key": self._name(key), "value": text_of(value), "lease": str(lease_id or 0)}
        try:
            return self._change(key, version, {"request_put": put}, deadline_s)
        except EtcdError as error:
            if error.code != NOT_FOUND or lease_id is None:
                raise
        return self._made(LeaseLost(lease_id), deadline_s)

    def delete(self, key: str, version: int, deadline_s: float) -> int:
        delete = {"request_delete_range": {"key": self._name(key)}}
        return self._change(key, version, delete, deadline_s)

    def settle(self, deadline_s: float) -> None:
        """From now on the latest change was made, or never will be."""
        if self._is_unsettled:
            self._fence(deadline_s)

    def _change(self, key: str, version: int, change: object, deadline_s: float) -> int:
        self.settle(deadline_s)
        self._number += 1
        self._is_unsettled = True
        body = self._transaction(self._name(key), version, change)
        tried = self._gateway.tried("/v3/kv/txn", body, TransactionAnswer, deadline_s)
        answer: TransactionAnswer = tried.answer
        if answer.succeeded:
            return self._settled(answer.header.revision)
        current = answer.found(0)
        marker = answer.found(1)
        if marker is not None and marker.value == self._number_text():
            return self._settled(marker.mod_revision)  # it was made by an earlier try
        has_moved = _revision(marker) != self._marker_revision
        if has_moved and _revision(current) == version:  # by a fence that arrived late
            return self._again(key, version, change, deadline_s)
        conflict = Conflict(key, None if current is None else current.versioned())
        if tried.is_repeated or has_moved:
            return self._made(conflict, deadline_s)
        self._is_unsettled = False
        raise conflict

    def _again(self, key: str, version: int, change: object, deadline_s: float) -> int:
        if time.monotonic() >= deadline_s:
            raise Unavailable(f"{self._gateway} delays the requests of this client")
        made = self._fence(deadline_s)
        return self._change(key, version, change, deadline_s) if made is None else made

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
            found: RangeAnswer = self._gateway.post("/v3/kv/range", body, RangeAnswer, deadline_s)
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
            "success": [{"request_put": {**marker, "value": text_of(self._number_text())}}],
            "failure": [{"request_range": marker}],
        }
        tried = self._gateway.tried("/v3/kv/txn", body, TransactionAnswer, deadline_s)
        answer: TransactionAnswer = tried.answer
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
        number = {"request_put": {**marker, "value": text_of(self._number_text())}}
        compare = [
            _has_revision(name, version),
            _has_revision(self._marker, self._marker_revision),
        ]
        failure = [{"request_range": {"key": name}}, {"request_range": marker}]
        return {"compare": compare, "success": [change, number], "failure": failure}

    def _number_text(self) -> bytes:
        return b"%d" % self._number

    def _name(self, key: str) -> str:
        return text_of(self._keys.key(key))


def _revision(found: KeyValue | None) -> int:
    return 0 if found is None else found.mod_revision


def _has_revision(name: str, revision: int) -> dict[str, str]:
    return {"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
