"""What the store is asked for, and the records of its log that follow from it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.coordinator.interface import (
    MAX_KEY_CHARACTERS,
    MAX_TTL_S,
    MAX_VALUE_BYTES,
    MIN_TTL_S,
    Changes,
    Lease,
    Listing,
    Versioned,
)

MAX_NUMBER = (1 << 63) - 1
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
Key = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_KEY_CHARACTERS)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_KEY_CHARACTERS)]
Value = Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]
Seconds = Annotated[float, msgspec.Meta(ge=MIN_TTL_S, le=MAX_TTL_S)]
Holder = Annotated[str, msgspec.Meta(max_length=256)]


class Tagged(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The base of requests, answers and records."""


# ---------------------------------------------------------------------- requests


class Grant(Tagged, frozen=True):
    ttl_s: Seconds
    holder: Holder


class KeepAlive(Tagged, frozen=True):
    lease_id: Number


class Revoke(Tagged, frozen=True):
    lease_id: Number


class Get(Tagged, frozen=True):
    key: Key


class List(Tagged, frozen=True):
    name: Name


class PutIf(Tagged, frozen=True):
    key: Key
    value: Value
    version: Number
    lease_id: Number | None = None


class DeleteIf(Tagged, frozen=True):
    key: Key
    version: Number


class Watch(Tagged, frozen=True):
    name: Name
    after_revision: Number
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]


Mutation = Grant | Revoke | PutIf | DeleteIf
Request = Mutation | KeepAlive | Get | List | Watch


class RequestId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which client asks, which of its requests it is, and how often that was sent before."""

    client: Number
    sequence: Number
    attempt: Number = 0


# ---------------------------------------------------------------------- answers


class Granted(Tagged, frozen=True):
    lease: Lease


class TimeLeft(Tagged, frozen=True):
    """Seconds that are left of a lease."""

    seconds: float


class Found(Tagged, frozen=True):
    entry: Versioned | None


class Listed(Tagged, frozen=True):
    listing: Listing


class Watched(Tagged, frozen=True):
    changes: Changes


class Written(Tagged, frozen=True):
    version: int


class Done(Tagged, frozen=True):
    revision: int


class Conflicts(Tagged, frozen=True):
    entry: Versioned | None


class IsLost(Tagged, frozen=True):
    lease_id: int


class IsCompacted(Tagged, frozen=True):
    pass


class Failed(Tagged, frozen=True):
    """NoEffect was changed."""

    reason: Annotated[str, msgspec.Meta(max_length=4096)]


Outcome = Granted | Written | Done
Answer = Outcome | TimeLeft | Found | Listed | Watched | Conflicts | IsLost | IsCompacted | Failed


# ---------------------------------------------------------------------- records of the log


class LeaseBegun(Tagged, frozen=True):
    lease_id: Number
    ttl_s: Seconds
    holder: Holder


class LeasesEnded(Tagged, frozen=True):
    lease_ids: tuple[Number, ...]


class KeyPut(Tagged, frozen=True):
    key: Key
    value: Value
    lease_id: Number | None


class KeyDeleted(Tagged, frozen=True):
    key: Key


class NoEffect(Tagged, frozen=True):
    """A lease that is to be revoked has ended before."""


Effect = LeaseBegun | LeasesEnded | KeyPut | KeyDeleted | NoEffect


class Record(Tagged, frozen=True):
    """One change of the store. `by` is the request that led to it; None for an expiry."""

    index: Number
    effect: Effect
    by: RequestId | None = None


class LeaseTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ttl_s: Seconds
    holder: Holder


class StoreImage(Tagged, frozen=True):
    """A store as it is written to disk: all but the times of leases and the changes so far."""

    index: Number
    revision: Number
    next_lease: Number
    entries: dict[Key, Versioned]
    leases: dict[Number, LeaseTerms]
    outcomes: tuple[tuple[Number, Number, Outcome], ...]  # of the latest request of each client


LogItem = StoreImage | Record
