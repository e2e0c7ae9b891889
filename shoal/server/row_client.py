"""The rows of embeddings on the servers, as a worker sees them (`embedding.RowStore`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from shoal.embedding.spec import TableSpec
from shoal.server.client import Client, Link
from shoal.server.handlers.rows import MOST_ROW_BYTES
from shoal.server.protocol.frames import Kind, Refused, decode, encode
from shoal.server.protocol.messages import Chunk, Rows
from shoal.server.shared_memory import bytes_of


class ServerStore:
    """Each server holds the rows whose ids are dealt to it.

    A pull costs a request a server; a push travels with the step's push and counts with it.
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
            link.later("rows", _ask(link, Kind.TABLE_MAKE, encode(spec))).result()

    def pull(self, table: str, ids: Tensor) -> Tensor:
        dim = self.specs[table].dim
        rows = torch.empty(len(ids), dim)
        most = max(1, MOST_ROW_BYTES // (8 + 4 * dim))
        waiting = []
        for link, places in self._dealt(table, ids):
            for part in torch.split(places, most):
                own = ids[part]
                into = torch.empty(len(part), dim)
                meta = encode(Rows(table, len(part)))
                ask = _ask(link, Kind.TABLE_PULL, meta, [bytes_of(own)], [bytes_of(into)])
                waiting.append((link.later("rows", ask), part, own, into))
        for future, part, _, into in waiting:
            future.result()
            rows[part] = into
        return rows

    def push(self, table: str, ids: Tensor, grads: Tensor, lr: float, step: int) -> None:
        """Every server is told, also one that holds none of the rows: it counts updates."""
        sequence = self.client.sequence + 1
        for link, places in self._dealt(table, ids, also_empty=True):
            own = ids[places]
            part = grads[places].contiguous()

            def send(link: Link = link, own: Tensor = own, part: Tensor = part) -> None:
                meta = encode(Rows(table, len(own), lr))
                payload = (bytes_of(own), bytes_of(part))
                link.send("push", Kind.TABLE_PUSH, meta, *payload, sequence=sequence)

            link.later("push", send, answered=False)

    def state(self, table: str) -> Iterator[dict[str, Tensor]]:
        for link in self.client.links:
            number = 0
            while chunk := self._chunk(link, table, number):
                yield chunk
                number += 1

    def load_state(self, table: str, chunks: Iterable[dict[str, Tensor]], steps: int) -> None:
        """The first worker speaks for all; what it loads counts when the workers meet."""
        if self.client.rank != self.client.first:
            return
        held = list(chunks)
        for link in self.client.links:
            meta = encode(Chunk(table, 0, (), steps))
            link.later("rows", _ask(link, Kind.TABLE_SET, meta)).result()
            for chunk in held:
                self._set(link, table, chunk, steps)

    def _dealt(
        self, table: str, ids: Tensor, also_empty: bool = False
    ) -> Iterator[tuple[Link, Tensor]]:
        """For each server, which of the ids are its own."""
        links = self.client.links
        owners = self.specs[table].owner(ids, len(links))
        for index, link in enumerate(links):
            places = torch.nonzero(owners == index).flatten()
            if len(places) or also_empty:
                yield link, places

    def _chunk(self, link: Link, table: str, number: int) -> dict[str, Tensor] | None:
        dim = self.specs[table].dim

        def do() -> dict[str, Tensor] | None:
            link.send("rows", Kind.TABLE_GET, encode(Rows(table, 0)), argument=number)
            meta, payload = link.answer_any("rows", Kind.TABLE_GET)
            found = decode(meta, Chunk)
            if len(payload) != found.count * (8 + 4 * dim * len(found.keys)):
                raise Refused("a chunk that is not as long as it says")
            if not found.keys:
                return None
            chunk = {"ids": torch.frombuffer(payload, dtype=torch.int64, count=found.count)}
            for i, key in enumerate(found.keys):
                at = found.count * (8 + 4 * dim * i)
                flat = torch.frombuffer(
                    payload, dtype=torch.float32, count=found.count * dim, offset=at
                )
                chunk[key] = flat.view(found.count, dim)
            return chunk

        return link.later("rows", do).result()

    def _set(self, link: Link, table: str, chunk: dict[str, Tensor], steps: int) -> None:
        keys = tuple(key for key in ("rows", *sorted(chunk)) if key in chunk)
        keys = tuple(dict.fromkeys(key for key in keys if key != "ids"))
        each = 8 + 4 * self.specs[table].dim * len(keys)
        for places in torch.split(torch.arange(len(chunk["ids"])), max(1, MOST_ROW_BYTES // each)):
            tensors = [chunk[key][places].contiguous() for key in ("ids", *keys)]
            meta = encode(Chunk(table, len(places), keys, steps))
            ask = _ask(link, Kind.TABLE_SET, meta, [bytes_of(t) for t in tensors])
            link.later("rows", ask).result()


def _ask(
    link: Link,
    kind: Kind,
    meta: bytes,
    payload: Sequence[memoryview] = (),
    into: Sequence[memoryview] = (),
) -> Callable[[], bytes]:
    """A request and its answer, for a lane to carry out."""

    def do() -> bytes:
        link.send("rows", kind, meta, *payload)
        return link.answer("rows", kind, into)

    return do
