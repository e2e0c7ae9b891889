"""What the gateway answers: JSON of declared types; numbers come as text, bytes as base64."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from shoal.coordinator.interface import Unavailable, Versioned
from shoal.runtime.decoders import lax_json_decoder

NOT_FOUND = 5  # codes of gRPC
ALREADY_EXISTS = 9  # "lease already exists": a failed precondition, for etcd
UNCERTAIN = frozenset({1, 2, 4, 14})  # cancelled, unknown, deadline exceeded, unavailable


class EtcdError(Unavailable):
    """etcd has refused a request."""

    def __init__(self, code: int, reason: str):
        self.code = code
        super().__init__(f"etcd: {reason}")


class Revision(msgspec.Struct, frozen=True):
    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0

    def versioned(self) -> Versioned:
        return Versioned(self.value, self.mod_revision, self.lease or None)


class RangeAnswer(msgspec.Struct, frozen=True):
    header: Revision = Revision()
    kvs: tuple[KeyValue, ...] = ()


class TransactionPart(msgspec.Struct, frozen=True):
    response_range: RangeAnswer = RangeAnswer()


class TransactionAnswer(msgspec.Struct, frozen=True):
    header: Revision
    succeeded: bool = False
    responses: tuple[TransactionPart, ...] = ()

    def found(self, part: int) -> KeyValue | None:
        """What a range of the failure branch has found."""
        kvs = self.responses[part].response_range.kvs if part < len(self.responses) else ()
        return kvs[0] if kvs else None


class LeaseAnswer(msgspec.Struct, frozen=True):
    ID: int = 0
    TTL: int = 0


class KeepAliveAnswer(msgspec.Struct, frozen=True):
    result: LeaseAnswer


class Anything(msgspec.Struct, frozen=True):
    pass


class WatchEvent(msgspec.Struct, frozen=True):
    kv: KeyValue
    type: str = "PUT"


class WatchResult(msgspec.Struct, frozen=True):
    header: Revision = Revision()
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: tuple[WatchEvent, ...] = ()


class WatchAnswer(msgspec.Struct, frozen=True):
    result: WatchResult = WatchResult()
    error: Any = None


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: Any = ""
    message: str = ""
    code: int = 2


T = TypeVar("T")


def parse(data: bytes, kind: type[T]) -> T:
    """ValueError for what is not such an answer."""
    try:
        return lax_json_decoder(kind).decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{data[:80]!r} is no answer of etcd ({error})") from error


def error_of(status: int, data: bytes) -> EtcdError:
    try:
        answer = parse(data, ErrorAnswer)
    except ValueError:
        return EtcdError(2, f"HTTP status {status}: {data[:80]!r}")
    return EtcdError(answer.code, str(answer.message or answer.error)[:400])
