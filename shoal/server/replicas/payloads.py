"""The payload of an operation as bytes between replicas. Lengths follow from the operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.embedding.chunks import chunk_columns, entry_bytes
from shoal.server.model.membership import Member
from shoal.server.model.push_buffer import PushTensors, RowPush
from shoal.server.model.served_model import ServedModel
from shoal.server.model.shard_state import check_state
from shoal.server.model_host import ModelHost
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.frames import Header, Refused
from shoal.server.replicas import operations as ops
from shoal.server.replicas.memory import PushMemory
from shoal.server.replicas.operations import EMPTY, Operation, Payload
from shoal.server.shared_memory import bytes_of

IN_MEMORY = 1  # `argument` of a frame: the gradients are in the memory of their worker


def views_of(payload: Payload, with_gradients: bool = True) -> list[memoryview]:
    """What is sent: gradients, loss and flags, rows; or plain bytes."""
    push = payload.push
    views = []
    if push is not None:
        views.append(bytes_of(push.loss_flags) if payload.flags is None else payload.flags)
    if push is not None and with_gradients:
        views.insert(0, bytes_of(push.gradients))
    for rows in payload.rows:
        views += [bytes_of(rows.ids), bytes_of(rows.grads)]
    return [*views, memoryview(payload.data)]


def read_payload(
    host: ModelHost, operation: Operation, connection: Connection, header: Header
) -> Payload:
    """Refused, before anything is allocated, where the length is another one."""
    num_bytes = header.payload_bytes
    if isinstance(operation, ops.Pushed):
        return _read_push(_model(host, operation.model), operation, connection, header)
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
        known = chunk_columns(table.spec, table.optimizer)
        columns = next((c for c in known if tuple(c)[1:] == operation.chunk.keys), {})
        return operation.chunk.count * entry_bytes(columns)
    if isinstance(operation, ops.ResidualSaved):
        compression = _model(host, operation.model).compression
        return 0 if compression is None else compression.residual_bytes
    return 0


def _read_push(
    model: ServedModel, operation: ops.Pushed, connection: Connection, header: Header
) -> Payload:
    member = model.membership.members.get(operation.worker)
    if member is None:
        raise Refused(f"a push of worker {operation.worker}, which has not joined here")
    pushes = member.pushes
    is_here = header.argument == IN_MEMORY
    source = memory_of(operation, member) if is_here else None
    if is_here and source is None:
        raise Refused(f"worker {operation.worker} shares no memory with this replica")
    dims = [model.tables.table(rows.table).spec.dim for rows in operation.rows]
    flag_bytes = pushes.loss_flags.nbytes
    expected = flag_bytes + (0 if is_here else pushes.gradients.nbytes)
    expected += sum(r.count * (8 + 4 * dim) for r, dim in zip(operation.rows, dims, strict=True))
    if header.payload_bytes != expected:
        raise _misfit(operation, expected, header.payload_bytes)
    if operation.is_lent and is_here and member.out is not None:
        flags = memoryview(bytearray(flag_bytes))
        connection.read_into(flags)
        return lent(member, member.out, flags, _read_rows(operation, dims, connection), source)
    tensors = pushes.new_tensors()
    if not is_here:
        connection.read_into(bytes_of(tensors.gradients))
    elif member.out is not None:
        tensors.gradients.copy_(member.out)
    flags = bytes_of(tensors.loss_flags)
    connection.read_into(flags)
    rows = _read_rows(operation, dims, connection)
    return Payload(rows=rows, push=tensors, source=source, flags=flags)


def lent(
    member: Member,
    gradients: Tensor,
    flags: memoryview,
    rows: tuple[RowPush, ...],
    source: PushMemory | None,
) -> Payload:
    """A push whose gradients are in the memory of its worker alone."""
    tensors = PushTensors(gradients, member.pushes.loss_flags)
    return Payload(rows=rows, push=tensors, source=source, is_lent=True, flags=flags)


def memory_of(operation: ops.Pushed, member: Member) -> PushMemory | None:
    """Where the worker has the gradients of a push; None if that is not mapped here."""
    if member.out is None or member.incarnation != operation.incarnation:
        return None
    identity = (operation.model, operation.worker, operation.incarnation)
    return PushMemory(*identity, *member.out_file)


def mapped_memories(host: ModelHost) -> tuple[PushMemory, ...]:
    """Of all workers that share it with this replica."""
    return tuple(
        PushMemory(number, member.worker, member.incarnation, *member.out_file)
        for number, model in list(host.models.items())
        for member in list(model.membership.members.values())
        if member.out is not None
    )


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
