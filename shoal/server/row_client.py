"""Rows of embedding tables on the servers, as a worker sees them (`embedding.store.RowStore`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from shoal.server.hot_set import NO_ROWS, HotSet, fetch_hot, refresh_hot
from shoal.server.link import PostedRequest, ServerLink
from shoal.server.protocol.frames import FrameKind, Refused, decode, encode
from shoal.server.protocol.messages import RowBatch, RowChunk
from shoal.server.protocol.row_messages import RowsPulled
from shoal.server.request import Reply, Request
from shoal.server.row_cache import RowCache
from shoal.server.row_routing import spread
from shoal.server.shared_memory import bytes_of


class _Asked(NamedTuple):
    """The rows of a pull that one server is asked for."""

    link: ServerLink
    positions: Tensor  # in the pull
    rows: Tensor
    reply: PostedRequest


class _Latest(NamedTuple):
    """The number of a set of hot rows, and a server that has it."""

    hot: int
    link: ServerLink


@dataclass(frozen=True)
class RowRules:
    """What a strategy allows for rows that are not asked of their owner.

    `version` is that of the weights that the worker has, and copies may be `copy_lag` versions
    older. Where the result of one device is promised, workers keep no rows.
    """

    version: Callable[[], int]
    seen_by: Callable[[int], list[str]]  # addresses of all servers, as one of them reaches them
    copy_lag: int = 0
    may_cache: bool = False
    may_copy: bool = True


class ServerStore(RowStore):
    """Each server holds the rows whose ids are assigned to it, and copies of hot rows.

    A pull costs one request per server. A push is sent with the push of the step, and counts if
    that one does.
    """

    def __init__(self, client: Client, rules: RowRules | None = None):
        self.client = client
        self.specs: dict[str, TableSpec] = {}
        self.caches: dict[str, RowCache] = {}
        self._rules = rules
        self._wants_latest = False
        self._hot: dict[str, HotSet] = {}
        self._steps: dict[str, int] = {}  # pushes of each table by this worker
        self._pulls = client.rank  # servers are asked for hot rows in another order each time

    def create(self, spec: TableSpec) -> None:
        if not self.specs:
            for link in self.client.links:
                link.open("rows")
        self.specs[spec.name] = spec
        self._steps.setdefault(spec.name, 0)
        if spec.cache_steps and self._rules is not None and self._rules.may_cache:
            self.caches[spec.name] = RowCache(spec.cache_steps)
        for link in self.client.links:
            _ask(link, Request(FrameKind.TABLE_MAKE, encode(spec)))

    @property
    def copies_rows(self) -> bool:
        """Whether hot rows are copied to all servers; replicas of a server serve pulls already."""
        return self._rules is not None and self._rules.may_copy

    @contextmanager
    def latest(self) -> Iterator[None]:
        """While the block runs, rows are as new as the weights of the worker."""
        self._wants_latest = True
        try:
            yield
        finally:
            self._wants_latest = False

    def pull(self, table: str, ids: Tensor) -> Tensor:
        cache = self.caches.get(table)
        if cache is None or self._wants_latest or not torch.is_grad_enabled():
            return self._pull(table, ids)
        rows = torch.empty(len(ids), self.specs[table].dim)
        step = self._steps[table]
        is_asked = ~cache.get(ids, step, rows)
        asked = ids[is_asked]
        if len(asked):
            rows[is_asked] = self._pull(table, asked)
            cache.put(asked, step, rows[is_asked])
        return rows

    def _pull(self, table: str, ids: Tensor) -> Tensor:
        rows = torch.empty(len(ids), self.specs[table].dim)
        owners = self.specs[table].owner(ids, len(self.client.links))
        asked = self._ask_for(table, ids, owners, self._targets(table, ids, owners))
        with self.client.tracer.span(WAIT, f"pull {len(ids)} rows of {table}"):
            missing, latest, refresh = _take(asked, rows)
            if len(missing):
                rest = torch.empty(len(missing), rows.shape[1])
                asked = self._ask_for(table, ids[missing], owners[missing], owners[missing])
                _take(asked, rest)
                rows[missing] = rest
        if self._rules is not None and self.copies_rows:
            if refresh:
                self._hot[table] = refresh_hot(
                    self.client, self.specs[table], self._known(table), self._rules.seen_by
                )
            elif latest is not None and latest.hot > self._known(table).number:
                self._hot[table] = fetch_hot(latest.link, table)
        return rows

    def _known(self, table: str) -> HotSet:
        return self._hot.get(table, NO_ROWS)

    def _targets(self, table: str, ids: Tensor, owners: Tensor) -> Tensor:
        """The server to ask for each row."""
        hot = self._known(table)
        if self._rules is None or not len(hot.ids):
            return owners
        self._pulls += 1
        is_hot = hot.contains(ids.numpy())
        return torch.from_numpy(spread(owners.numpy(), is_hot, len(self.client.links), self._pulls))

    def _version(self) -> int:
        """The version that copies have at least."""
        if self._rules is None:
            return 0
        return max(0, self._rules.version() - (0 if self._wants_latest else self._rules.copy_lag))

    def _ask_for(self, table: str, ids: Tensor, owners: Tensor, targets: Tensor) -> list[_Asked]:
        """Ask for rows, each of its target; copies come before rows that it owns."""
        dim = self.specs[table].dim
        max_rows = max(1, MAX_ROW_BYTES // (8 + 4 * dim))
        version = self._version()
        asked = []
        for index, link in enumerate(self.client.links):
            is_mine = targets == index
            copies = torch.nonzero(is_mine & (owners != index)).flatten()
            own = torch.nonzero(is_mine & (owners == index)).flatten()
            for positions in torch.split(torch.cat([copies, own]), max_rows):
                if not len(positions):
                    continue
                rows = torch.empty(len(positions), dim)
                count = int((owners[positions] != index).sum()) if len(copies) else 0
                request = Request(
                    FrameKind.TABLE_PULL,
                    encode(RowBatch(table, len(positions), copies=count, version=version)),
                    payload=(bytes_of(ids[positions]),),
                    into=(bytes_of(rows),),
                )
                asked.append(_Asked(link, positions, rows, link.post("rows", request)))
        return asked

    def push(self, table: str, ids: Tensor, grads: Tensor, lr: float, step: int) -> None:
        """A server that holds none of the rows receives an empty push: it counts updates."""
        self.next_step(table)
        owners = self.specs[table].owner(ids, len(self.client.links))
        for index, link in enumerate(self.client.links):
            positions = torch.nonzero(owners == index).flatten()
            request = Request(
                FrameKind.TABLE_PUSH,
                encode(RowBatch(table, len(positions), lr)),
                payload=(bytes_of(ids[positions]), bytes_of(grads[positions].contiguous())),
                sequence=self.client.sequence + 1,
                is_answered=False,
            )
            link.post("push", request)

    def next_step(self, table: str) -> None:
        """A step of this worker has ended: rows that it keeps are a step older."""
        self._steps[table] += 1

    def state(self, table: str) -> Iterator[dict[str, Tensor]]:
        for link in self.client.links:
            number = 0
            while chunk := self._get_chunk(link, table, number):
                yield chunk
                number += 1

    def load_state(self, table: str, chunks: Iterable[dict[str, Tensor]], steps: int) -> None:
        """The lowest surviving worker loads for all; it takes effect at the next barrier."""
        if table in self.caches:
            self.caches[table].clear()
        if self.client.rank != self.client.lowest_survivor:
            return
        loaded = list(chunks)
        for link in self.client.links:
            _ask(link, Request(FrameKind.TABLE_SET, encode(RowChunk(table, 0, (), steps))))
            for chunk in loaded:
                self._set_chunk(link, table, chunk, steps)

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


def _take(asked: Sequence[_Asked], rows: Tensor) -> tuple[Tensor, _Latest | None, bool]:
    """Take the answers: positions without a row, the newest hot set, and whether to choose one."""
    missing = []
    latest: _Latest | None = None
    refresh = False
    for each in asked:
        answer = decode(each.reply.result().meta, RowsPulled)
        rows[each.positions] = each.rows
        if answer.missing:
            missing.append(each.positions[list(answer.missing)])
        if latest is None or answer.hot > latest.hot:
            latest = _Latest(answer.hot, each.link)
        refresh |= answer.refresh
    empty = torch.zeros(0, dtype=torch.int64)
    return torch.cat([empty, *missing]), latest, refresh


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
