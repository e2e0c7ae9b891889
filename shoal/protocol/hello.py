"""The messages of the handshake, and why a request is refused. Loads no torch."""

from __future__ import annotations

import secrets
from typing import Annotated, Literal

import msgspec

Channel = Literal["control", "push", "pull", "rows", "follow", "coordinator", "chain"]
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
