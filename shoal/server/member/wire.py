"""Messages between copies as metadata of frames. The operation in them is bytes by itself."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch

from shoal.protocol.connection import Connection
from shoal.protocol.frames import Refused
from shoal.server.chain.messages import Append, ChainMessage, Teach
from shoal.server.member.operations import EMPTY, AnyOperation, Operation, Payload, Pushed
from shoal.server.model.push_buffer import RowPush
from shoal.server.model.served_model import ServedModel
from shoal.server.process.model_host import ModelHost
from shoal.server.shared_memory import bytes_of

_messages = msgspec.msgpack.Decoder(ChainMessage)
_operations = msgspec.msgpack.Decoder(AnyOperation)


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
    return msgspec.structs.replace(message, op=op)


def decode_message(meta: bytes) -> tuple[ChainMessage, Operation | None]:
    """A message, and the operation in it; Refused if it is none."""
    try:
        message = _messages.decode(meta)
        if not isinstance(message, Append | Teach):
            return message, None
        return message, _operations.decode(message.op)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise Refused(f"not a message between replicas: {error}") from error


def views_of(payload: Payload) -> list[memoryview]:
    """What is sent: gradients, loss and flags, rows; or plain bytes."""
    views = [bytes_of(tensor) for tensor in payload.push or ()]
    for rows in payload.rows:
        views += [bytes_of(rows.ids), bytes_of(rows.grads)]
    return [*views, memoryview(payload.data)]


def read_payload(
    host: ModelHost, operation: Operation, connection: Connection, num_bytes: int
) -> Payload:
    """Refused, before anything is allocated, where the length is another one."""
    model = host.models.get(operation.model)
    expected = 0 if model is None else operation.payload_bytes(model)
    if num_bytes != expected:
        kind = type(operation).__name__
        raise Refused(f"{kind} of another replica has {num_bytes} bytes, expected {expected}")
    if model is None or not expected:
        return EMPTY
    if isinstance(operation, Pushed):
        return _read_push(model, operation, connection)
    data = bytearray(expected)
    connection.read_into(memoryview(data))
    return Payload(data)


def _read_push(model: ServedModel, operation: Pushed, connection: Connection) -> Payload:
    push = model.membership.members[operation.worker].pushes.new_tensors()
    rows = []
    for batch in operation.rows:
        grads = torch.empty(batch.count, model.tables.table(batch.table).spec.dim)
        ids = torch.empty(batch.count, dtype=torch.int64)
        rows.append(RowPush(batch.table, ids, grads, batch.lr))
    payload = Payload(rows=tuple(rows), push=push)
    for view in views_of(payload):
        connection.read_into(view)
    return payload
