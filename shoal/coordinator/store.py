"""The store: a pure state machine. Time is an argument; nothing here waits or writes.

    check(request, now)      raises Conflict, LeaseLost, Unavailable where it cannot be carried out
    apply(record, now)       the change, the same on every replay of the log

Between the two the record is made durable. So a request whose record could not be written has
changed nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from shoal.coordinator import (
    Conflict,
    DeleteIf,
    Grant,
    Key,
    Lease,
    LeaseLost,
    Listing,
    Mutation,
    Number,
    Outcome,
    PutIf,
    Tagged,
    Unavailable,
    Versioned,
)

MAX_KEYS = 8192
MAX_LEASES = 8192
MAX_STATE_BYTES = 8 << 20
MAX_CLIENTS = 4096  # whose latest outcome is kept


class RequestId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which client asks, which of its requests it is, and how often that was sent before."""

    client: Number
    sequence: Number
    attempt: Number = 0


class Expired(Tagged, frozen=True):
    """The time of these leases is over."""

    lease_ids: tuple[Number, ...]


class Record(Tagged, frozen=True):
    """One change of the store. `by` is the request that led to it; None for an expiry."""

    index: Number
    change: Mutation | Expired
    by: RequestId | None = None


class StoreImage(Tagged, frozen=True):
    """A store as it is written to disk: all but the times of leases."""

    index: Number
    revision: Number
    next_lease: Number
    entries: dict[Key, Versioned]
    leases: dict[Number, Grant]
    outcomes: tuple[tuple[Number, Number, Outcome], ...]  # of the latest request of each client


@dataclass
class _HeldLease:
    terms: Grant
    ends_s: float
    keys: set[str] = field(default_factory=set)


def covers(name: str, key: str) -> bool:
    """Whether a name stands for this key: as it is, or as what the key begins with."""
    is_prefix = not name or name.endswith("/")
    return key.startswith(name) if is_prefix else key == name


class Store:
    """Keys, leases, and the outcomes of requests."""

    def __init__(self) -> None:
        self.index = 0  # of the latest record
        self.revision = 0
        self._next_lease = 1
        self._entries: dict[str, Versioned] = {}
        self._entry_bytes = 0
        self._leases: dict[int, _HeldLease] = {}
        self._outcomes: OrderedDict[int, tuple[int, Outcome]] = OrderedDict()

    # ------------------------------------------------------------------ reading

    def list(self, name: str) -> Listing:
        found = {key: self._entries[key] for key in sorted(self._entries) if covers(name, key)}
        return Listing(found)

    def outcome(self, by: RequestId) -> Outcome | None:
        """What a request led to that was carried out before, if it is the client's latest."""
        sequence, outcome = self._outcomes.get(by.client, (None, None))
        return outcome if sequence == by.sequence else None

    # ------------------------------------------------------------------ leases

    def renew(self, lease_id: int, now_s: float) -> float:
        lease = self._held(lease_id, now_s)
        lease.ends_s = now_s + lease.terms.ttl_s
        return lease.terms.ttl_s

    def expired(self, now_s: float) -> Expired | None:
        ended = sorted(number for number, held in self._leases.items() if held.ends_s <= now_s)
        return Expired(tuple(ended)) if ended else None

    def _held(self, lease_id: int, now_s: float) -> _HeldLease:
        lease = self._leases.get(lease_id)
        if lease is None or lease.ends_s <= now_s:
            raise LeaseLost.of(lease_id)
        return lease

    # ------------------------------------------------------------------ changing

    def check(self, request: Mutation, now_s: float) -> None:
        """Raise the error of a request that cannot be carried out."""
        if isinstance(request, Grant) and len(self._leases) >= MAX_LEASES:
            raise Unavailable(f"the coordinator holds {MAX_LEASES} leases, and no more")
        if isinstance(request, PutIf | DeleteIf):
            current = self._entries.get(request.key)
            if request.version != (0 if current is None else current.version):
                raise Conflict.of(request.key, current)
        if isinstance(request, DeleteIf) and not request.version:
            raise Conflict.of(request.key, None)
        if isinstance(request, PutIf):
            self._check_room(request.key, request.value)
            if request.lease_id is not None:
                self._held(request.lease_id, now_s)

    def _check_room(self, key: str, value: bytes) -> None:
        old = self._entries.get(key)
        more_bytes = _entry_bytes(key, value) - (_entry_bytes(key, old.value) if old else 0)
        if old is None and len(self._entries) >= MAX_KEYS:
            raise Unavailable(f"the coordinator holds {MAX_KEYS} keys, and no more")
        if more_bytes > 0 and self._entry_bytes + more_bytes > MAX_STATE_BYTES:
            raise Unavailable(f"the coordinator holds {MAX_STATE_BYTES} bytes, and no more")

    def apply(self, record: Record, now_s: float) -> Outcome:
        """The records of a log come one after the other, none twice and none left out."""
        if record.index != self.index + 1:
            raise ValueError(f"record {record.index} after record {self.index}")
        self.index = record.index
        outcome = self._apply(record.change, now_s)
        if record.by is not None:
            self._outcomes.pop(record.by.client, None)
            self._outcomes[record.by.client] = (record.by.sequence, outcome)
            if len(self._outcomes) > MAX_CLIENTS:
                self._outcomes.popitem(last=False)
        return outcome

    def _apply(self, change: Mutation | Expired, now_s: float) -> Outcome:
        match change:
            case Grant(ttl_s):
                lease = Lease(self._next_lease, ttl_s)
                self._next_lease += 1
                self._leases[lease.id] = _HeldLease(change, now_s + ttl_s)
                return lease
            case Expired(lease_ids):
                for lease_id in lease_ids:
                    self._end(lease_id)
            case PutIf(key, value, _, bound_to):
                self._put(key, value, bound_to)
            case DeleteIf(key):
                self._delete(key)
        return self.revision

    def _end(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id, None)
        for key in sorted(lease.keys) if lease is not None else ():
            self._delete(key)

    def _put(self, key: str, value: bytes, lease_id: int | None) -> None:
        self._unbind(key)
        self.revision += 1
        self._entries[key] = Versioned(value, self.revision, lease_id)
        self._entry_bytes += _entry_bytes(key, value)
        if lease_id is not None:
            self._leases[lease_id].keys.add(key)

    def _delete(self, key: str) -> None:
        self._unbind(key)
        del self._entries[key]
        self.revision += 1

    def _unbind(self, key: str) -> None:
        old = self._entries.get(key)
        if old is None:
            return
        self._entry_bytes -= _entry_bytes(key, old.value)
        if old.lease_id in self._leases:
            self._leases[old.lease_id].keys.discard(key)

    # ------------------------------------------------------------------ to and from disk

    def image(self) -> StoreImage:
        leases = {number: held.terms for number, held in self._leases.items()}
        outcomes = tuple((client, *known) for client, known in self._outcomes.items())
        return StoreImage(
            self.index, self.revision, self._next_lease, dict(self._entries), leases, outcomes
        )

    @classmethod
    def of_image(cls, image: StoreImage, now_s: float) -> Store:
        """Leases have their whole time."""
        store = cls()
        store.index = image.index
        store.revision = image.revision
        store._next_lease = image.next_lease
        for number, terms in image.leases.items():
            store._leases[number] = _HeldLease(terms, now_s + terms.ttl_s)
        for key, entry in image.entries.items():
            store._entries[key] = entry
            store._entry_bytes += _entry_bytes(key, entry.value)
            if entry.lease_id in store._leases:
                store._leases[entry.lease_id].keys.add(key)
        for client, sequence, outcome in image.outcomes:
            store._outcomes[client] = (sequence, outcome)
        return store


def _entry_bytes(key: str, value: bytes) -> int:
    return len(key.encode()) + len(value)
