"""Authenticated connections that carry frames: of servers, of the coordinator."""

from __future__ import annotations

import enum
import secrets
import struct
import zlib
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from shoal.errors import ShoalError
from shoal.runtime.decoders import decode_msgpack

MAGIC = b"SHOL"
VERSION = 3
_FIELDS = struct.Struct("<4sHHIIQQQQQI")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECK.size
MAX_META_BYTES = 32 << 20  # names and shapes of the parameters of a very large model


class FrameKind(enum.IntEnum):
    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    ERROR = 4
    OK = 5
    SETUP = 10
    BUCKET = 11
    COMMIT = 12
    SETTLE = 13
    PULL = 14
    STATE_GET = 15
    STATE_SET = 16
    BARRIER = 17
    STATS = 18
    LEAVE = 19
    SHARE_WEIGHTS = 20
    TOTAL_NORM = 21
    ENTER = 22
    SHARE_DEVICE = 23
    FOLLOW = 30
    ENTRY = 31
    NORMS = 32
    TABLE_MAKE = 40
    TABLE_PULL = 41
    TABLE_PUSH = 42
    TABLE_GET = 43
    TABLE_SET = 44
    TABLE_HEAT = 45
    TABLE_HOT_GET = 46
    TABLE_HOT_SET = 47
    FOLLOW_ROWS = 48
    COPIED_ROWS = 49
    SHARE_ROWS = 53
    COMPRESSED = 50
    RESIDUAL_SET = 51
    RESIDUAL_GET = 52
    COORDINATE = 60
    CHAIN = 61
    SNAPSHOT = 62
    AVERAGE = 70


_KINDS = {kind.value: kind for kind in FrameKind}  # faster than FrameKind(…)


class Refused(ShoalError):
    """Bytes that are not a frame, or a frame that is not allowed here."""


class Header(NamedTuple):
    kind: FrameKind
    worker: int = 0
    model: int = 0
    incarnation: int = 0
    sequence: int = 0
    argument: int = 0
    payload_bytes: int = 0
    meta_bytes: int = 0
    epoch: int = 0
    check: int = 0


def pack(header: Header, meta: bytes = b"", payload_bytes: int | None = None) -> bytes:
    """Header and metadata as bytes; the payload follows them."""
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        header.kind,
        header.epoch,
        header.worker,
        header.model,
        header.incarnation,
        header.sequence,
        header.argument,
        header.payload_bytes if payload_bytes is None else payload_bytes,
        len(meta),
    )
    return fields + _CHECK.pack(zlib.crc32(meta, zlib.crc32(fields))) + meta


def unpack(data: bytes | bytearray | memoryview) -> Header:
    """The header in 64 bytes. `verify` compares its checksum, which needs the metadata."""
    magic, version, kind, epoch, worker, model, inc, seq, argument, payload, meta = (
        _FIELDS.unpack_from(data)
    )
    if magic != MAGIC:
        raise Refused("not a frame of Shoal")
    if version != VERSION:
        raise Refused(f"expected frame version {VERSION}, got {version}")
    named = _KINDS.get(kind)
    if named is None:
        raise Refused(f"unknown kind of message: {kind}")
    (check,) = _CHECK.unpack_from(data, _FIELDS.size)
    return Header(named, worker, model, inc, seq, argument, payload, meta, epoch, check)


def verify(head: bytes | bytearray | memoryview, meta: bytes, header: Header) -> None:
    """Refuse a frame whose header or metadata was damaged in transit."""
    if zlib.crc32(meta, zlib.crc32(memoryview(head)[: _FIELDS.size])) != header.check:
        raise Refused("checksum of a frame does not match")


T = TypeVar("T")


def encode(value: Any) -> bytes:
    """A struct or a dataclass as msgpack."""
    return msgspec.msgpack.encode(value)


def decode(data: bytes, kind: type[T]) -> T:
    """Metadata as `kind`; unknown fields are refused."""
    try:
        return decode_msgpack(data, kind)
    except ValueError as error:
        raise Refused(f"metadata is {error}") from error


Channel = Literal["control", "push", "pull", "rows", "follow", "coordinator", "chain", "gossip"]
Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
MAX_HELLO_BYTES = 512


class WireMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of all metadata."""


class Challenge(WireMessage, frozen=True):
    nonce: Nonce


class Hello(WireMessage, frozen=True):
    nonce: Nonce
    channel: Channel
    code: Nonce


class Welcome(WireMessage, frozen=True):
    code: Nonce


class Moved(WireMessage, frozen=True):
    """Another copy of the shard is to be asked: the head, in the chain of `epoch`."""

    epoch: _Count
    head: _Count | None  # the number of the replica; None where this one does not know it
    members: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=64)] = ()  # head first


class ErrorReply(WireMessage, frozen=True):
    """Why a request was refused. `lost` is the worker whose loss is the cause.

    With `is_loss` that is the loss of a server, which `reason` names.

    With `moved` nothing of the request has had an effect here: send it to the head.
    """

    reason: Annotated[str, msgspec.Meta(max_length=4096)]
    lost: int | None = None
    moved: Moved | None = None
    is_loss: bool = False


_RANDOM_BITS = 48
MAX_GENERATION = (1 << 15) - 1


def new_incarnation(generation: int = 0) -> int:
    return min(generation, MAX_GENERATION) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)


def generation_of(incarnation: int) -> int:
    return incarnation >> _RANDOM_BITS
