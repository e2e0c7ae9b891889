"""Rows of embedding tables. Ids and lengths are checked before anything is allocated."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.server.embedding.spec import TableSpec
from shoal.server.member.operations import RowsSet, TableMade
from shoal.server.messages import Heat, HotRows, RowBatch, RowChunk, ShareRows
from shoal.server.model.shard import RowPush
from shoal.server.process.peer import Peer, handles
from shoal.server.process.requests import catch_up
from shoal.server.protocol import FrameKind, Header, Refused, encode
from shoal.server.protocol.connection import Connection
from shoal.server.rows.memory import RowTarget, attach
from shoal.server.shared_memory import bytes_of

MAX_ROW_BYTES = 256 << 20  # of one request; a client splits larger ones


@handles(FrameKind.TABLE_MAKE, "rows", TableSpec)
def make(peer: Peer, header: Header, spec: TableSpec) -> None:
    peer.host.execute(TableMade(peer.model_id, spec))
    peer.reply()


@handles(FrameKind.TABLE_PULL, "rows", RowBatch, has_payload=True)
def pull(peer: Peer, header: Header, request: RowBatch) -> None:
    dim = peer.read(lambda: peer.model.tables.table(request.table)).spec.dim
    check_size(header, request.count, 8 if request.memory is None else 16, 8 + 4 * dim)
    if request.copies > request.count:
        raise Refused(f"{request.copies} copies among {request.count} rows")
    count = request.count
    if request.memory is None:
        ids = read_numbers(peer.connection, count)
        target = RowTarget(peer.row_buffer.rows(count, dim))
    else:
        memory = peer.member.row_memory.get(request.memory)
        if memory is None or request.places * dim > len(memory):
            raise Refused(f"memory {request.memory} has no room for {request.places} rows")
        numbers = read_numbers(peer.connection, 2 * count)
        rows = memory[: request.places * dim].reshape(request.places, dim)
        ids = numbers[:count]
        target = RowTarget(rows, numbers[count:])
    try:
        pulled = peer.read(lambda: peer.model.pull_rows(peer.worker, request, ids, target))
    except IndexError as error:
        raise Refused(f"places of rows in memory {request.memory}: {error}") from error
    payload = () if target.places is not None else (bytes_of(torch.from_numpy(target.rows)),)
    peer.reply_committed(encode(pulled), *payload)


@handles(FrameKind.SHARE_ROWS, "rows", ShareRows)
def share(peer: Peer, header: Header, request: ShareRows) -> None:
    """A worker passes memory for the rows that it pulls."""
    with peer.descriptor(is_needed=True) as descriptor:
        assert descriptor is not None
        peer.member.row_memory[request.number] = attach(descriptor)
    peer.reply()


@handles(FrameKind.TABLE_PUSH, "push", RowBatch, has_payload=True)
def push(peer: Peer, header: Header, request: RowBatch) -> None:
    """No answer: the commit that follows is answered."""
    dim = peer.model.tables.table(request.table).spec.dim
    check_size(header, request.count, 8 + 4 * dim, 0)
    ids = torch.from_numpy(read_numbers(peer.connection, request.count))
    grads = torch.from_numpy(read_numbers(peer.connection, request.count * dim, np.float32))
    rows = RowPush(request.table, ids, grads.view(request.count, dim), request.lr)
    catch_up(peer, header.sequence)
    peer.model.tables.stage(peer.member.pushes, header.sequence, rows)


@handles(FrameKind.TABLE_GET, "rows", RowBatch)
def get_chunk(peer: Peer, header: Header, request: RowBatch) -> None:
    """The chunk of a table's state behind the cursor in `argument`."""

    def read() -> tuple[dict[str, Tensor] | None, int]:
        with peer.model.lock:
            table = peer.model.tables.table(request.table)
            chunk_rows = max(1, MAX_ROW_BYTES // (16 * table.spec.dim))
            return peer.table_reader.read(table, header.argument, chunk_rows), table.steps

    tensors, steps = peer.read(read)
    if tensors is None:
        peer.reply(encode(RowChunk(request.table, 0, (), steps)))
        return
    first, *keys = tensors
    chunk = RowChunk(request.table, len(tensors[first]), tuple(keys), steps)
    peer.reply(encode(chunk), *map(bytes_of, tensors.values()))


@handles(FrameKind.TABLE_SET, "rows", RowChunk, has_payload=True)
def set_chunk(peer: Peer, header: Header, chunk: RowChunk) -> None:
    """Clear a table, or load a chunk of saved rows."""
    if header.payload_bytes > MAX_ROW_BYTES:
        raise Refused(f"{header.payload_bytes} bytes of rows are too many for one request")
    peer.execute_with_payload(RowsSet(peer.model_id, chunk), header)


def check_size(header: Header, count: int, entry_bytes: int, answer_bytes: int) -> None:
    """`count` entries of that many bytes arrive, and entries of `answer_bytes` go back."""
    is_too_long = count * max(entry_bytes, answer_bytes) > MAX_ROW_BYTES
    if header.payload_bytes != count * entry_bytes or is_too_long:
        raise Refused(f"{header.payload_bytes} bytes for {count} rows of {answer_bytes} bytes")


def read_numbers(connection: Connection, count: int, dtype: type = np.int64) -> Any:
    """An array of a payload whose size was checked."""
    numbers: Any = np.empty(count, dtype)
    connection.read_into(memoryview(numbers))
    return numbers


@handles(FrameKind.TABLE_HEAT, "rows", RowBatch)
def get_heat(peer: Peer, header: Header, request: RowBatch) -> None:
    """The counts of rows since the last request."""
    with peer.model.lock:
        hot = peer.model.tables.hot_table(request.table)
        found, total = hot.take_counts()
        number = hot.number
    numbers = torch.from_numpy(np.concatenate([found.ids, found.counts]))
    peer.reply(encode(Heat(len(found.ids), total, number)), bytes_of(numbers))


@handles(FrameKind.TABLE_HOT_GET, "rows", RowBatch)
def get_hot(peer: Peer, header: Header, request: RowBatch) -> None:
    """The present set of hot rows."""
    with peer.model.lock:
        hot = peer.model.tables.hot_table(request.table)
        answer = HotRows(request.table, hot.number, len(hot.ids), hot.is_published)
        ids = torch.from_numpy(hot.ids)
    peer.reply(encode(answer), bytes_of(ids))


@handles(FrameKind.TABLE_HOT_SET, "rows", HotRows, has_payload=True)
def set_hot(peer: Peer, header: Header, request: HotRows) -> None:
    """Take a set of hot rows, or publish those of this server."""
    hot = peer.model.tables.hot_table(request.table)
    if request.addresses and len(request.addresses) != peer.model.spec.servers:
        raise Refused(f"{len(request.addresses)} addresses of {peer.model.spec.servers} servers")
    check_size(header, request.count, 8, 0)
    ids = read_numbers(peer.connection, request.count)
    with peer.model.lock:
        hot.choose(request.number, ids, request.publish)
        peer.model.lock.notify_all()
    if request.addresses:
        peer.host.row_copies(peer.model_id).follow(request.addresses)
    peer.reply()


@handles(FrameKind.FOLLOW_ROWS, "follow")
def follow_rows(peer: Peer, header: Header, meta: bytes) -> None:
    """Another server asks for the hot rows of this one, until the model is released."""
    peer.host.row_copies(peer.model_id).serve(peer.worker, peer.connection)
