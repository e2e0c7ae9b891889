"""The coordinator: leases, compare-and-set, watches and versions that only grow. Loads no torch."""

from __future__ import annotations

import threading
from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Annotated, Any, TypeVar

import msgspec

from shoal.errors import BadInput, ShoalError
from shoal.runtime import clock
from shoal.runtime.decoders import msgpack_decoder

MAX_VALUE_BYTES = 64 << 10
MAX_NUMBER = (1 << 63) - 1
WATCH_S = 5.0
_LOOK_S = 0.1
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
Key = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Name = Annotated[str, msgspec.Meta(max_length=512)]
Value = Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]
Seconds = Annotated[float, msgspec.Meta(ge=0.05, le=86_400.0)]


class Tagged(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The base of requests and answers."""


# ---------------------------------------------------------------------- answers


class Versioned(Tagged, frozen=True):
    """The value of a key, and the revision at which it was written."""

    value: bytes
    version: int
    lease_id: int | None = None


class Lease(Tagged, frozen=True):
    """Ends `ttl_s` after it was granted or kept alive the last time, not earlier.

    Its holder counts from before it sent the request.
    """

    id: int
    ttl_s: float


class Listing(Tagged, frozen=True):
    """Keys and values at one moment."""

    entries: dict[str, Versioned] = {}


class Failed(Tagged, frozen=True):
    """An error of a coordinator, by the name of its class."""

    error: str
    reason: Annotated[str, msgspec.Meta(max_length=4096)]


class CoordinatorError(ShoalError):
    """What a coordinator answers instead of a result."""


class Conflict(CoordinatorError):
    """The key has another version than the one that was asked for; nothing changed."""

    @classmethod
    def of(cls, key: str, current: Versioned | None) -> Conflict:
        at = "does not exist" if current is None else f"is at version {current.version}"
        return cls(f"{key} was changed by another process: it {at}")


class LeaseLost(CoordinatorError):
    """The lease has ended, and its keys with it."""

    @classmethod
    def of(cls, lease_id: int) -> LeaseLost:
        return cls(f"lease {lease_id} has ended, and its keys were deleted")


class Unavailable(CoordinatorError):
    """The coordinator did not answer in time, is full, or could not write its store."""


_ERRORS = {each.__name__: each for each in (Conflict, LeaseLost, Unavailable)}


# ---------------------------------------------------------------------- requests


class Grant(Tagged, frozen=True):
    ttl_s: Seconds
    holder: Annotated[str, msgspec.Meta(max_length=256)]


class KeepAlive(Tagged, frozen=True):
    lease_id: Number


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


Mutation = Grant | PutIf | DeleteIf
Request = Mutation | KeepAlive | List
Outcome = Lease | int  # of a mutation; the revision of a change
Answer = Outcome | float | Listing | Failed  # a number of seconds: what a lease has left
requests: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Request)
_checking = threading.Lock()  # msgspec inspects a type when it first meets it
T = TypeVar("T")


class Coordinator(AbstractContextManager["Coordinator"]):
    """See the top of this file. Thread-safe."""

    @abstractmethod
    def _ask(self, request: Request) -> Answer: ...

    @abstractmethod
    def close(self) -> None:
        """Calls that wait in other threads end with Unavailable."""

    def __exit__(self, *_: object) -> None:
        self.close()

    def grant(self, ttl_s: float, holder: str) -> Lease:
        """A new lease; `holder` is its name for people who look."""
        return self._result(Grant(ttl_s, holder), Lease)

    def keep_alive(self, lease_id: int) -> float:
        """Renew a lease; the seconds that are left of it now, at least. LeaseLost."""
        return self._result(KeepAlive(lease_id), float)

    def get(self, key: str) -> Versioned | None:
        return self.list(key).entries.get(key)

    def list(self, name: str) -> Listing:
        return self._result(List(name), Listing)

    def live(self, name: str) -> dict[str, Versioned]:
        """The keys that are bound to a lease which has not ended."""
        found = self.list(name).entries
        return {key: entry for key, entry in found.items() if entry.lease_id is not None}

    def put_if(
        self, key: str, value: bytes, version: int, lease_id: int | None = None
    ) -> Versioned:
        """Write a key that has this version; 0: that does not exist. Conflict, LeaseLost."""
        revision = self._result(PutIf(key, value, version, lease_id), int)
        return Versioned(value, revision, lease_id)

    def delete_if(self, key: str, version: int) -> int:
        """Delete a key that has this version; the revision of its deletion. Conflict."""
        return self._result(DeleteIf(key, version), int)

    def watch(self, name: str, seen: Listing | None, timeout_s: float = WATCH_S) -> Listing:
        """The keys as soon as they are others than those that were seen, or after `timeout_s`."""
        deadline_s = clock.monotonic() + timeout_s
        while (found := self.list(name)) == seen and clock.monotonic() < deadline_s:
            clock.sleep(_LOOK_S)
        return found

    def _result(self, request: Request, kind: type[T]) -> T:
        try:
            with _checking:
                requests.decode(msgspec.msgpack.encode(request))
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
            raise BadInput(f"a coordinator does not take {describe(request)}: {error}") from error
        answer = self._ask(request)
        if isinstance(answer, Failed):
            raise _ERRORS.get(answer.error, Unavailable)(answer.reason)
        if not isinstance(answer, kind):
            raise Unavailable(f"{type(answer).__name__} is no answer to {describe(request)}")
        return answer


def describe(request: Request) -> str:
    """For errors: `PutIf chain/0`."""
    fields = msgspec.structs.asdict(request)
    about = fields.get("key") or fields.get("name") or fields.get("lease_id") or ""
    return f"{type(request).__name__} {about}"[:200].strip()


class Alive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which life of the replica it is, where it listens, and which process it is there.

    Processes of another `host` use `remote` where `address` is a Unix socket. `unreachable` are
    replicas of its shard, by number, to which it has had no connection for a while.
    """

    incarnation: int
    address: str = ""
    pid: int = 0
    remote: str = ""
    host: str = ""
    unreachable: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)] = ()


def alive_key(process: int) -> str:
    return f"alive/{process}"


def forget(coordinator: Coordinator, process: int, pid: int) -> bool:
    """Delete the key of a process that has exited: the others need not wait for its lease.

    False where the key is that of another process, which may have taken its place.
    """
    key = alive_key(process)
    found = coordinator.get(key)
    if found is None or not pid:
        return False
    try:
        if msgpack_decoder(Alive).decode(found.value).pid != pid:
            return False
        coordinator.delete_if(key, found.version)
    except (msgspec.MsgspecError, Conflict):
        return False
    return True
