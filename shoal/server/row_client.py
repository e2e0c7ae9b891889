"""Rows of embedding tables on the servers, as a worker sees them (`embedding.store.RowStore`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

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
        dim = self.specs[table].dim
        if len(payload) != chunk.count * (8 + 4 * dim * len(chunk.keys)):
            raise Refused(f"a chunk of {table!r} is not as long as its header says")
        if not chunk.keys:
            return None
        tensors = {"ids": torch.frombuffer(payload, dtype=torch.int64, count=chunk.count)}
        for i, key in enumerate(chunk.keys):
            offset = chunk.count * (8 + 4 * dim * i)
            numbers = chunk.count * dim
            flat = torch.frombuffer(payload, dtype=torch.float32, count=numbers, offset=offset)
            tensors[key] = flat.view(chunk.count, dim)
        return tensors

    def _set_chunk(
        self, link: ServerLink, table: str, chunk: dict[str, Tensor], steps: int
    ) -> None:
        keys = tuple(sorted(set(chunk) - {"ids"}, key=lambda key: (key != "rows", key)))
        row_bytes = 8 + 4 * self.specs[table].dim * len(keys)
        max_rows = max(1, MAX_ROW_BYTES // row_bytes)
        for positions in torch.split(torch.arange(len(chunk["ids"])), max_rows):
            tensors = [chunk[key][positions].contiguous() for key in ("ids", *keys)]
            meta = encode(RowChunk(table, len(positions), keys, steps))
            _ask(link, Request(FrameKind.TABLE_SET, meta, tuple(map(bytes_of, tensors))))


def _ask(link: ServerLink, request: Request) -> Reply:
    return link.post("rows", request).result()
