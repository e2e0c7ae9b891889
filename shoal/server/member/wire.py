"""Messages between copies as metadata of frames. The operation in them is bytes by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from shoal.embedding.chunks import columns_with, entry_bytes
from shoal.protocol.connection import Connection
from shoal.protocol.frames import Refused
from shoal.server.chain.messages import Append, ChainMessage, Teach
from shoal.server.member import operations as ops
from shoal.server.member.operations import EMPTY, Operation, Payload
from shoal.server.model.push_buffer import RowPush
from shoal.server.model.served_model import ServedModel
from shoal.server.model.shard_state import check_state
from shoal.server.process.model_host import ModelHost
from shoal.server.shared_memory import bytes_of

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
    if isinstance(operation, ops.Pushed):
        return _read_push(_model(host, operation.model), operation, connection, num_bytes)
    expected = _expected_bytes(host, operation)
    if num_bytes != expected:
        raise _misfit(operation, expected, num_bytes)
    if not expected:
        return EMPTY
    data = bytearray(expected)
    connection.read_into(memoryview(data))
    return Payload(data)


def _expected_bytes(host: ModelHost, operation: Operation) -> int:
    if isinstance(operation, ops.StateSet):
        return check_state(_model(host, operation.model).state.shard, operation.state)
    if isinstance(operation, ops.RowsSet):
        table = _model(host, operation.model).tables.table(operation.chunk.table)
        columns = columns_with(table.spec, table.optimizer, operation.chunk.keys)
        return operation.chunk.count * entry_bytes(columns)
    if isinstance(operation, ops.ResidualSaved):
        compression = _model(host, operation.model).compression
        return 0 if compression is None else compression.residual_bytes
    return 0


def _read_push(
    model: ServedModel, operation: ops.Pushed, connection: Connection, num_bytes: int
) -> Payload:
    member = model.membership.members.get(operation.worker)
    if member is None:
        raise Refused(f"a push of worker {operation.worker}, which has not joined here")
    pushes = member.pushes
    dims = [model.tables.table(rows.table).spec.dim for rows in operation.rows]
    expected = pushes.gradients.nbytes + pushes.loss_flags.nbytes
    expected += sum(r.count * (8 + 4 * dim) for r, dim in zip(operation.rows, dims, strict=True))
    if num_bytes != expected:
        raise _misfit(operation, expected, num_bytes)
    tensors = pushes.new_tensors()
    for tensor in tensors:
        connection.read_into(bytes_of(tensor))
    return Payload(rows=_read_rows(operation, dims, connection), push=tensors)


def _read_rows(
    operation: ops.Pushed, dims: Sequence[int], connection: Connection
) -> tuple[RowPush, ...]:
    rows = []
    for batch, dim in zip(operation.rows, dims, strict=True):
        ids = torch.empty(batch.count, dtype=torch.int64)
        grads = torch.empty(batch.count, dim)
        connection.read_into(bytes_of(ids))
        connection.read_into(bytes_of(grads))
        rows.append(RowPush(batch.table, ids, grads, batch.lr))
    return tuple(rows)


def _model(host: ModelHost, number: int) -> ServedModel:
    model = host.models.get(number)
    if model is None:
        raise Refused(f"an operation on model {number}, which is not held here")
    return model


def _misfit(operation: Operation, expected: int, found: int) -> Refused:
    kind = type(operation).__name__
    return Refused(f"{kind} of another replica has {found} bytes, expected {expected}")
