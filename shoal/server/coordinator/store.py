"""What a coordinator holds, as a value: each change makes a new one. Nothing here waits or writes.

So a change that could not be written to the disk was not made.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from shoal.server.coordinator import (
    Conflict,
    DeleteIf,
    Grant,
    Key,
    Lease,
    Listing,
    Mutation,
    Number,
    Outcome,
    PutIf,
    Unavailable,
    Versioned,
)

MAX_KEYS = 8192
MAX_LEASES = 8192
MAX_STATE_BYTES = 8 << 20
MAX_CLIENTS = 4096  # whose latest outcome is kept


class RequestId(msgspec.Struct, frozen=True):
    """Which client asks, which of its requests it is, and how often that was sent before."""

    client: Number
    sequence: Number
    attempt: Number = 0


def covers(name: str, key: str) -> bool:
    """Whether a name stands for this key: as it is, or as what the key begins with."""
    is_prefix = not name or name.endswith("/")
    return key.startswith(name) if is_prefix else key == name


class Store(msgspec.Struct, forbid_unknown_fields=True):
    """Keys, leases without their times, and the outcome of each client's latest change."""

    revision: Number = 0
    next_lease: Number = 1
    entries: dict[Key, Versioned] = {}
    leases: dict[Number, Grant] = {}
    outcomes: dict[Number, tuple[Number, Outcome]] = {}  # of each client: a request, its outcome

    def list(self, name: str) -> Listing:
        found = {key: self.entries[key] for key in sorted(self.entries) if covers(name, key)}
        return Listing(found)

    def outcome(self, by: RequestId) -> Outcome | None:
        """What a request led to that was carried out before, if it is the client's latest."""
        sequence, outcome = self.outcomes.get(by.client, (None, None))
        return outcome if sequence == by.sequence else None

    def after(self, request: Mutation, by: RequestId | None = None) -> tuple[Store, Outcome]:
        """The store with this change, and its outcome; Conflict, Unavailable."""
        store = self._copy()
        if isinstance(request, Grant):
            outcome: Outcome = store._grant(request)
        else:
            store._change(request)
            outcome = store.revision
        if by is not None:
            store.outcomes.pop(by.client, None)
            store.outcomes[by.client] = (by.sequence, outcome)
            if len(store.outcomes) > MAX_CLIENTS:
                del store.outcomes[next(iter(store.outcomes))]
        return store, outcome

    def without(self, leases: Collection[int]) -> Store:
        """The store after the time of these leases."""
        store = self._copy()
        for lease_id in leases:
            del store.leases[lease_id]
        bound = [key for key, entry in self.entries.items() if entry.lease_id in leases]
        for key in bound:
            del store.entries[key]
        store.revision += len(bound)
        return store

    def _copy(self) -> Store:
        copies = {"entries": dict(self.entries), "leases": dict(self.leases)}
        return msgspec.structs.replace(self, **copies, outcomes=dict(self.outcomes))

    def _grant(self, request: Grant) -> Lease:
        if len(self.leases) >= MAX_LEASES:
            raise Unavailable(f"the coordinator holds {MAX_LEASES} leases, and no more")
        lease = Lease(self.next_lease, request.ttl_s)
        self.next_lease += 1
        self.leases[lease.id] = request
        return lease

    def _change(self, request: PutIf | DeleteIf) -> None:
        current = self.entries.pop(request.key, None)
        version = 0 if current is None else current.version
        is_missing = isinstance(request, DeleteIf) and current is None
        if is_missing or request.version != version:
            raise Conflict.of(request.key, current)
        self.revision += 1
        if isinstance(request, PutIf):
            self.entries[request.key] = Versioned(request.value, self.revision, request.lease_id)
            self._check_room()

    def _check_room(self) -> None:
        if len(self.entries) > MAX_KEYS:
            raise Unavailable(f"the coordinator holds {MAX_KEYS} keys, and no more")
        if sum(len(k.encode()) + len(e.value) for k, e in self.entries.items()) > MAX_STATE_BYTES:
            raise Unavailable(f"the coordinator holds {MAX_STATE_BYTES} bytes, and no more")
