"""What servers ask of a coordinator, whichever one it is.

    RemoteCoordinator    the process that the launcher starts (client.py, service.py)
    EtcdCoordinator      an etcd cluster (etcd/)

A key has a value and a version. A version is the revision of the store at the key's latest
change: it only grows, also when the key is deleted and made again, and across restarts. A key
that is bound to a lease is deleted when the lease ends.

A name that ends with "/" (or is empty) stands for all keys that begin with it; any other name
stands for that key alone.

All calls end within a bounded time. After `Unavailable` from `put_if` or `delete_if` the change
may have been made or not. The next call of the same coordinator that returns settles it: what it
sees is final, and the lost change is not made after that.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from shoal.errors import ShoalError

MAX_KEY_CHARACTERS = 512
MAX_VALUE_BYTES = 64 << 10
MIN_TTL_S = 0.05
MAX_TTL_S = 86_400.0
WATCH_S = 5.0


class Versioned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of a key, and the revision at which it was written."""

    value: bytes
    version: int
    lease_id: int | None = None


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ends `ttl_s` after it was granted or kept alive the last time, not earlier.

    Its holder counts from before it sent the request.
    """

    id: int
    ttl_s: float


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key was written; or deleted, with `value` None. Its new version is `revision`."""

    key: str
    value: bytes | None
    revision: int
    lease_id: int | None = None


class Changes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All changes up to `revision`, in their order: watch from there on."""

    revision: int
    changes: tuple[Change, ...] = ()


class Listing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys and values at one moment, and the revision to watch from."""

    revision: int
    entries: dict[str, Versioned] = {}


class CoordinatorError(ShoalError):
    """The base class of what a coordinator answers instead of a result."""


class Conflict(CoordinatorError):
    """The key has another version than the one that was asked for; nothing was changed."""

    def __init__(self, key: str, current: Versioned | None):
        self.key = key
        self.current = current
        at = "does not exist" if current is None else f"is at version {current.version}"
        super().__init__(f"{key} was changed by another process: it {at}")


class LeaseLost(CoordinatorError):
    """The lease has ended, and its keys with it."""

    def __init__(self, lease_id: int):
        self.lease_id = lease_id
        super().__init__(f"lease {lease_id} has ended, and its keys were deleted")


class Compacted(CoordinatorError):
    """Changes after so old a revision are not known any more: list the keys, watch from there."""

    def __init__(self, after_revision: int):
        self.after_revision = after_revision
        super().__init__(f"changes after revision {after_revision} are not kept any more")


class Unavailable(CoordinatorError):
    """The coordinator did not answer in time, or could not write its log."""


class Coordinator(Protocol):
    """See the top of this file. Thread-safe."""

    def grant(self, ttl_s: float, holder: str) -> Lease:
        """A new lease; `holder` is its name for people who look."""

    def keep_alive(self, lease_id: int) -> float:
        """Renew a lease; the seconds that are left of it now, at least. LeaseLost."""

    def revoke(self, lease_id: int) -> None:
        """End a lease and delete its keys; nothing if it has ended."""

    def get(self, key: str) -> Versioned | None: ...

    def list(self, name: str) -> Listing: ...

    def live(self, name: str) -> dict[str, Versioned]:
        """The keys that are bound to a lease which has not ended."""

    def put_if(
        self, key: str, value: bytes, version: int, lease_id: int | None = None
    ) -> Versioned:
        """Write a key that has this version; 0: that does not exist. Conflict, LeaseLost."""

    def delete_if(self, key: str, version: int) -> int:
        """Delete a key that has this version; the revision of its deletion. Conflict."""

    def watch(self, name: str, after_revision: int, timeout_s: float = WATCH_S) -> Changes:
        """Wait for changes after a revision; none when `timeout_s` have passed. Compacted."""

    def close(self) -> None: ...
