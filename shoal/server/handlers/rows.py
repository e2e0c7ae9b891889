"""Rows of embedding tables. Ids and lengths are checked before anything is allocated."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.embedding.spec import TableSpec
from shoal.server.handlers.dispatch import handles
from shoal.server.model.push_buffer import RowPush
from shoal.server.peer import Peer
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.frames import FrameKind, Header, Refused, decode, encode
from shoal.server.protocol.messages import RowBatch, RowChunk
from shoal.server.shared_memory import bytes_of

MAX_ROW_BYTES = 256 << 20  # of one request; a client splits larger ones


@handles(FrameKind.TABLE_MAKE, "rows")
def make(peer: Peer, header: Header, meta: bytes) -> None:
    model, _ = peer.joined()
    model.tables.make(decode(meta, TableSpec))
    peer.reply()


@handles(FrameKind.TABLE_PULL, "rows", has_payload=True)
def pull(peer: Peer, header: Header, meta: bytes) -> None:
    model, _ = peer.joined()
    request = decode(meta, RowBatch)
    dim = model.tables.table(request.table).spec.dim
    _check_size(header, request.count, 0, dim)
    ids = _read(peer.connection, request.count, torch.int64)
    rows = model.tables.pull(request.table, ids)
    peer.reply(b"", bytes_of(rows))


@handles(FrameKind.TABLE_PUSH, "push", has_payload=True)
def push(peer: Peer, header: Header, meta: bytes) -> None:
    """No answer: the commit that follows is answered."""
    model, member = peer.joined()
    request = decode(meta, RowBatch)
    dim = model.tables.table(request.table).spec.dim
    _check_size(header, request.count, 1, dim)
    ids = _read(peer.connection, request.count, torch.int64)
    grads = _read(peer.connection, request.count * dim, torch.float32).view(request.count, dim)
    rows = RowPush(request.table, ids, grads, request.lr)
    model.tables.stage(member.pushes, header.sequence, rows)


@handles(FrameKind.TABLE_GET, "rows")
def get_chunk(peer: Peer, header: Header, meta: bytes) -> None:
    """Chunk `argument` of a table's state."""
    model, _ = peer.joined()
    name = decode(meta, RowBatch).table
    with model.lock:
        table = model.tables.table(name)
        chunk_rows = max(1, MAX_ROW_BYTES // (16 * table.spec.dim))
        tensors = peer.table_reader.read(table, header.argument, chunk_rows)
        keys = table.keys
        steps = table.steps
    if tensors is None:
        peer.reply(encode(RowChunk(name, 0, (), steps)))
        return
    chunk = RowChunk(name, len(tensors["ids"]), keys, steps)
    peer.reply(encode(chunk), *(bytes_of(tensors[key]) for key in ("ids", *keys)))


@handles(FrameKind.TABLE_SET, "rows", has_payload=True)
def set_chunk(peer: Peer, header: Header, meta: bytes) -> None:
    """Clear a table, or load a chunk of saved rows."""
    model, _ = peer.joined()
    request = decode(meta, RowChunk)
    with model.lock:
        table = model.tables.table(request.table)
        dim = table.spec.dim
        keys = table.keys
        if not request.keys:
            table.load_state([], request.steps)
    if request.keys and request.keys != keys:
        raise Refused(f"expected a chunk of {keys}, got {request.keys}")
    _check_size(header, request.count, len(request.keys), dim)
    chunk = {"ids": _read(peer.connection, request.count, torch.int64)}
    for key in request.keys:
        rows = _read(peer.connection, request.count * dim, torch.float32)
        chunk[key] = rows.view(request.count, dim)
    if request.keys:
        with model.lock:
            table.load_chunk(chunk)
    peer.reply()


def _check_size(header: Header, count: int, tensors: int, dim: int) -> None:
    num_bytes = count * (8 + 4 * dim * tensors)
    answer_bytes = count * (8 + 4 * dim * max(1, tensors))
    if header.payload_bytes != num_bytes or answer_bytes > MAX_ROW_BYTES:
        raise Refused(f"{header.payload_bytes} bytes for {count} rows of {dim} numbers")


def _read(connection: Connection, count: int, dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(count, dtype=dtype)
    connection.read_into(bytes_of(tensor))
    return tensor
