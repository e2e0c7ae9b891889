"""The methods of a coordinator, as requests and answers: for all that speak in them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any, TypeVar

import msgspec

from shoal.coordinator.interface import (
    WATCH_S,
    Changes,
    Compacted,
    Conflict,
    CoordinatorError,
    Lease,
    LeaseLost,
    Listing,
    Unavailable,
    Versioned,
)
from shoal.coordinator.records import (
    Answer,
    Conflicts,
    DeleteIf,
    Done,
    Failed,
    Found,
    Get,
    Grant,
    Granted,
    IsCompacted,
    IsLost,
    KeepAlive,
    List,
    Listed,
    PutIf,
    Request,
    Revoke,
    TimeLeft,
    Watch,
    Watched,
    Written,
)
from shoal.errors import BadInput

T = TypeVar("T", bound=Answer)
_requests: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Request)
_checking = threading.Lock()


class Requester(ABC):
    """A coordinator that is asked by `_ask`."""

    @abstractmethod
    def _ask(self, request: Request) -> Answer: ...

    def grant(self, ttl_s: float, holder: str) -> Lease:
        return self._result(Grant(ttl_s, holder), Granted).lease

    def keep_alive(self, lease_id: int) -> float:
        return self._result(KeepAlive(lease_id), TimeLeft).seconds

    def revoke(self, lease_id: int) -> None:
        self._result(Revoke(lease_id), Done)

    def get(self, key: str) -> Versioned | None:
        return self._result(Get(key), Found).entry

    def list(self, name: str) -> Listing:
        return self._result(List(name), Listed).listing

    def live(self, name: str) -> dict[str, Versioned]:
        return leased(self.list(name))

    def put_if(
        self, key: str, value: bytes, version: int, lease_id: int | None = None
    ) -> Versioned:
        written = self._result(PutIf(key, value, version, lease_id), Written, key)
        return Versioned(value, written.version, lease_id)

    def delete_if(self, key: str, version: int) -> int:
        return self._result(DeleteIf(key, version), Done, key).revision

    def watch(self, name: str, after_revision: int, timeout_s: float = WATCH_S) -> Changes:
        request = Watch(name, after_revision, float(timeout_s))
        return self._result(request, Watched, after_revision=after_revision).changes

    def _result(self, request: Request, kind: type[T], key: str = "", after_revision: int = 0) -> T:
        check_request(request)
        answer = self._ask(request)
        if isinstance(answer, kind):
            return answer
        match answer:
            case Conflicts(entry):
                raise Conflict(key, entry)
            case IsLost(lease_id):
                raise LeaseLost(lease_id)
            case IsCompacted():
                raise Compacted(after_revision)
            case Failed(reason):
                raise Unavailable(reason)
        raise CoordinatorError(f"{type(answer).__name__} is no answer to {describe(request)}")


def leased(listing: Listing) -> dict[str, Versioned]:
    return {key: entry for key, entry in listing.entries.items() if entry.lease_id is not None}


def check_request(request: Request) -> None:
    """BadInput for a key, value, time or version that no coordinator takes."""
    try:
        with _checking:  # msgspec inspects a type when it first meets it: one thread at a time
            _requests.decode(msgspec.msgpack.encode(request))
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
        raise BadInput(f"a coordinator does not take {describe(request)}: {error}") from error


def describe(request: Request) -> str:
    """For errors: `PutIf chain/0`."""
    fields = msgspec.structs.asdict(request)
    about = fields.get("key") or fields.get("name") or fields.get("lease_id") or ""
    return f"{type(request).__name__} {about}"[:200].strip()
