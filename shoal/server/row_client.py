"""Rows of embedding tables on the servers, as a worker sees them (`embedding.store.RowStore`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.embedding.chunks import chunk_columns, entry_bytes, fit_chunks
from shoal.embedding.pool import Column
from shoal.embedding.spec import TableSpec
from shoal.embedding.store import RowStore
from shoal.observe.trace import WAIT
from shoal.server.client import Client
from shoal.server.handlers.rows import MAX_ROW_BYTES
from shoal.server.link import ServerLink
from shoal.server.protocol.frames import FrameKind, Refused, decode, encode
from shoal.server.protocol.messages import RowBatch, RowChunk
from shoal.server.request import Reply, Request
from shoal.server.shared_memory import bytes_of


class _OwnedIds(NamedTuple):
    """The ids of a request that one server owns, and their positions in that request."""

    link: ServerLink
    ids: Tensor
    positions: Tensor


class ServerStore(RowStore):
    """Each server holds the rows whose ids are assigned to it.

    A pull costs one request per server. A push is sent with the push of the step, and counts if
    that one does.
    """

    def __init__(self, client: Client):
        self.client = client
        self.specs: dict[str, TableSpec] = {}

    def create(self, spec: TableSpec) -> None:
        if not self.specs:
            for link in self.client.links:
                link.open("rows")
        self.specs[spec.name] = spec
        for link in self.client.links:
            _ask(link, Request(FrameKind.TABLE_MAKE, encode(spec)))

    def pull(self, table: str, ids: Tensor) -> Tensor:
        dim = self.specs[table].dim
        rows = torch.empty(len(ids), dim)
        max_rows = max(1, MAX_ROW_BYTES // (8 + 4 * dim))
        pending = []
        for owned in self._by_owner(table, ids):
            if not len(owned.ids):
                continue
            for positions in torch.split(owned.positions, max_rows):
                pulled = torch.empty(len(positions), dim)
                request = Request(
                    FrameKind.TABLE_PULL,
                    encode(RowBatch(table, len(positions))),
                    payload=(bytes_of(ids[positions]),),
                    into=(bytes_of(pulled),),
                )
                pending.append((owned.link.post("rows", request), positions, pulled))
        with self.client.tracer.span(WAIT, f"pull {len(ids)} rows of {table}"):
            for reply, positions, pulled in pending:
                reply.result()
                rows[positions] = pulled
        return rows

    def push(self, table: str, ids: Tensor, grads: Tensor, lr: float, step: int) -> None:
        """A server that holds none of the rows receives an empty push: it counts updates."""
        for owned in self._by_owner(table, ids):
            request = Request(
                FrameKind.TABLE_PUSH,
                encode(RowBatch(table, len(owned.ids), lr)),
                payload=(bytes_of(owned.ids), bytes_of(grads[owned.positions].contiguous())),
                sequence=self.client.sequence + 1,
                is_answered=False,
            )
            owned.link.post("push", request)

    def state(self, table: str) -> Iterator[dict[str, Tensor]]:
        for link in self.client.links:
            number = 0
            while chunk := self._get_chunk(link, table, number):
                yield chunk
                number += 1

    def load_state(self, table: str, chunks: Iterable[dict[str, Tensor]], steps: int) -> None:
        """The lowest surviving worker loads for all; it takes effect at the next barrier."""
        if self.client.rank != self.client.lowest_survivor:
            return
        loaded = list(chunks)
        for link in self.client.links:
            _ask(link, Request(FrameKind.TABLE_SET, encode(RowChunk(table, 0, (), steps))))
            for chunk in loaded:
                self._set_chunk(link, table, chunk, steps)

    def _by_owner(self, table: str, ids: Tensor) -> Iterator[_OwnedIds]:
        links = self.client.links
        owners = self.specs[table].owner(ids, len(links))
        for index, link in enumerate(links):
            positions = torch.nonzero(owners == index).flatten()
            yield _OwnedIds(link, ids[positions], positions)

    def _get_chunk(self, link: ServerLink, table: str, number: int) -> dict[str, Tensor] | None:
        """The next rows that were used; None after the last."""
        request = Request(
            FrameKind.TABLE_GET, encode(RowBatch(table, 0)), into=None, argument=number
        )
        meta, payload = _ask(link, request)
        chunk = decode(meta, RowChunk)
        spec = self.specs[table]
        if not chunk.keys:
            return None
        known = chunk_columns(spec, spec.optimizer)
        columns = next((each for each in known if tuple(each)[1:] == chunk.keys), {})
        if not columns or len(payload) != chunk.count * entry_bytes(columns):
            raise Refused(f"a chunk of {table!r} is not as its header says")
        return _read_columns(columns, chunk.count, payload)

    def _set_chunk(
        self, link: ServerLink, table: str, chunk: dict[str, Tensor], steps: int
    ) -> None:
        spec = self.specs[table]
        for part in fit_chunks(spec, spec.optimizer, chunk, steps):
            first, *keys = part
            row_bytes = sum(tensor[:1].nbytes for tensor in part.values())
            max_rows = max(1, MAX_ROW_BYTES // max(1, row_bytes))
            for positions in torch.split(torch.arange(len(part[first])), max_rows):
                tensors = [tensor[positions].contiguous() for tensor in part.values()]
                meta = encode(RowChunk(table, len(positions), tuple(keys), steps))
                _ask(link, Request(FrameKind.TABLE_SET, meta, tuple(map(bytes_of, tensors))))


def _read_columns(columns: dict[str, Column], count: int, payload: bytearray) -> dict[str, Tensor]:
    """The tensors of a chunk that lie in a payload one after the other."""
    tensors = {}
    offset = 0
    for key, column in columns.items():
        numbers = count * (column.width or 1)
        flat = torch.frombuffer(payload, dtype=column.dtype, count=numbers, offset=offset)
        tensors[key] = flat if column.width is None else flat.view(count, column.width)
        offset += numbers * column.dtype.itemsize
    return tensors


def _ask(link: ServerLink, request: Request) -> Reply:
    return link.post("rows", request).result()
