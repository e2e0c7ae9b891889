"""Messages between replicas as metadata of frames. The operation in them is bytes by itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from shoal.server.chain.messages import Append, ChainMessage, Teach
from shoal.server.protocol.frames import Refused
from shoal.server.replicas.operations import EMPTY, Operation, Payload

_messages = msgspec.msgpack.Decoder(ChainMessage)
_operations = msgspec.msgpack.Decoder(Operation)


class Proposed(NamedTuple):
    """What the chain carries: it never looks into it."""

    operation: Operation
    payload: Payload = EMPTY


def encode_message(message: ChainMessage) -> tuple[bytes, Payload]:
    """The metadata, and the payload that follows it."""
    if not isinstance(message, Append | Teach):
        return msgspec.msgpack.encode(message), EMPTY
    proposed: Proposed = message.op
    operation = msgspec.msgpack.encode(proposed.operation)
    return msgspec.msgpack.encode(with_op(message, operation)), proposed.payload


def with_op(message: Append | Teach, op: bytes | Proposed | None) -> Append | Teach:
    """The same message with another operation, or its bytes, or none."""
    if isinstance(message, Append):
        return Append(message.epoch, message.position, message.committed, op)
    return Teach(message.epoch, message.position, op)


def decode_message(meta: bytes) -> tuple[ChainMessage, Operation | None]:
    """A message, and the operation in it; Refused if it is none."""
    try:
        message = _messages.decode(meta)
        if not isinstance(message, Append | Teach):
            return message, None
        return message, _operations.decode(_as_bytes(message.op))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refused(f"not a message between replicas: {error}") from error


def _as_bytes(op: Any) -> bytes:
    if not isinstance(op, bytes):
        raise ValueError("an operation is bytes")
    return op
