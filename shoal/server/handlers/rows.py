"""Requests for rows of tables, as a server answers them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from shoal.embedding.spec import TableSpec
from shoal.errors import BadInput
from shoal.server.model.served_model import Holding, Member, RowPush
from shoal.server.protocol.connection import Connection
from shoal.server.protocol.frames import Header, Kind, Refused, decode, encode
from shoal.server.protocol.messages import Chunk, Rows
from shoal.server.shared_memory import bytes_of

MOST_ROW_BYTES = 256 << 20  # of one request; a client asks in several


class Answer(Protocol):
    def __call__(self, kind: Kind, meta: bytes = b"", *payload: memoryview) -> None: ...


class RowRequests:
    """One connection's; ids and lengths are checked before anything is made of them."""

    def __init__(
        self,
        connection: Connection,
        here: Callable[[], tuple[Holding, Member]],
        answer: Answer,
    ):
        self.connection = connection
        self._here = here
        self._answer = answer
        self._saving: Iterator[dict[str, Tensor]] = iter(())
        self._saved = -1  # chunks of it that were given

    def make(self, header: Header, meta: bytes) -> None:
        holding, _ = self._here()
        try:
            holding.make_table(decode(meta, TableSpec))
        except BadInput as error:
            raise Refused(str(error)) from error
        self._answer(Kind.OK)

    def pull(self, header: Header, meta: bytes) -> None:
        holding, _ = self._here()
        request = decode(meta, Rows)
        dim = holding.table(request.table).spec.dim
        self._check_size(header, request.count, 0, dim)
        ids = self._read(request.count, torch.int64)
        rows = holding.pull_rows(request.table, ids)
        self._answer(Kind.OK, b"", bytes_of(rows))

    def push(self, header: Header, meta: bytes) -> None:
        """No answer: the commit that follows is answered."""
        holding, member = self._here()
        request = decode(meta, Rows)
        dim = holding.table(request.table).spec.dim
        self._check_size(header, request.count, 1, dim)
        ids = self._read(request.count, torch.int64)
        grads = self._read(request.count * dim, torch.float32).view(request.count, dim)
        push = RowPush(request.table, ids, grads, request.lr)
        holding.stage_rows(member.worker, header.sequence, push)

    def get(self, header: Header, meta: bytes) -> None:
        """Chunk number `argument` of a table's state: the first, or the next one.

        Or any, on a connection that was made anew.
        """
        holding, _ = self._here()
        name = decode(meta, Rows).table
        with holding.changed:
            table = holding.table(name)
            if header.argument == 0 or header.argument != self._saved:
                self._saving = table.state(max(1, MOST_ROW_BYTES // (16 * table.spec.dim)))
                for _ in zip(range(header.argument), self._saving, strict=False):
                    pass
            self._saved = header.argument + 1
            chunk = next(self._saving, None)
            count = 0 if chunk is None else len(chunk["ids"])
            found = Chunk(name, count, () if chunk is None else table.keys, table.steps)
        tensors = [] if chunk is None else [chunk["ids"], *(chunk[key] for key in found.keys)]
        self._answer(Kind.OK, encode(found), *map(bytes_of, tensors))

    def set(self, header: Header, meta: bytes) -> None:
        """Start anew, or take over a chunk of saved rows."""
        holding, _ = self._here()
        request = decode(meta, Chunk)
        with holding.changed:
            table = holding.table(request.table)
            dim = table.spec.dim
            keys = table.keys
            if not request.keys:
                table.load_state([], request.steps)
        if request.keys and request.keys != keys:
            raise Refused(f"a chunk of {request.keys}, and this table keeps {keys}")
        self._check_size(header, request.count, len(request.keys), dim)
        chunk = {"ids": self._read(request.count, torch.int64)}
        for key in request.keys:
            rows = self._read(request.count * dim, torch.float32)
            chunk[key] = rows.view(request.count, dim)
        if request.keys:
            with holding.changed:
                table.load_chunk(chunk)
        self._answer(Kind.OK)

    def _check_size(self, header: Header, count: int, tensors: int, dim: int) -> None:
        wanted = count * (8 + 4 * dim * tensors)
        if (
            header.payload_bytes != wanted
            or count * (8 + 4 * dim * max(1, tensors)) > MOST_ROW_BYTES
        ):
            raise Refused(f"{header.payload_bytes} bytes for {count} rows of {dim} numbers")

    def _read(self, count: int, dtype: torch.dtype) -> Tensor:
        found = torch.empty(count, dtype=dtype)
        self.connection.read_into(bytes_of(found))
        return found
