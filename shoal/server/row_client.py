"""Rows of embedding tables on the servers, as a worker sees them (`embedding.store.RowStore`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.embedding.chunks import chunk_columns, cursor_after, entry_bytes, fit_chunks
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
    """Rows that one server is asked for."""

    link: ServerLink
    start: int  # of them in the order of the requests
    reply: PostedRequest


class _Requests(NamedTuple):
    """The rows of a pull in the order in which servers are asked for them."""

    asked: list[_Asked]
    order: Tensor  # their positions in the pull
    rows: Tensor

    def in_place(self) -> Tensor:
        """The rows as the pull has them; one gather is faster than a scatter for each server."""
        places = torch.empty_like(self.order)
        in_order = torch.arange(len(self.order))
        if torch.equal(self.order, in_order):
            return self.rows
        places.scatter_(0, self.order, in_order)
        return self.rows.index_select(0, places)


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
        return cache.pull(ids, self._steps[table], lambda asked: self._pull(table, asked))

    def _pull(self, table: str, ids: Tensor) -> Tensor:
        owners = self.specs[table].owner(ids, len(self.client.links))
        requests = self._ask_for(table, ids, owners, self._targets(table, ids, owners))
        with self.client.tracer.span(WAIT, f"pull {len(ids)} rows of {table}"):
            missing, latest, refresh = _take(requests)
            rows = requests.in_place()
            if len(missing):
                rest = self._ask_for(table, ids[missing], owners[missing], owners[missing])
                _take(rest)
                rows[missing] = rest.in_place()
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

    def _ask_for(self, table: str, ids: Tensor, owners: Tensor, targets: Tensor) -> _Requests:
        """Ask for rows, each of its target; copies come before rows that it owns."""
        keys = 2 * targets + (owners == targets)
        order = torch.argsort(keys, stable=True)
        servers = len(self.client.links)
        counts = torch.bincount(keys, minlength=2 * servers).view(servers, 2).tolist()
        rows = torch.empty(len(ids), self.specs[table].dim)
        requests = _Requests([], order, rows)
        start = 0
        for link, (copies, own) in zip(self.client.links, counts, strict=True):
            stop = start + copies + own
            of_server = slice(start, stop)
            requests.asked.extend(
                self._ask(link, table, ids[order[of_server]], rows[of_server], start, copies)
            )
            start = stop
        return requests

    def _ask(
        self, link: ServerLink, table: str, ids: Tensor, rows: Tensor, start: int, copies: int
    ) -> Iterator[_Asked]:
        """The requests to one server, of which the first rows are copies."""
        max_rows = max(1, MAX_ROW_BYTES // (8 + 4 * rows.shape[1]))
        version = self._version()
        for first in range(0, len(ids), max_rows):
            part = slice(first, first + max_rows)
            count = len(ids[part])
            copied = max(0, min(count, copies - first))
            request = Request(
                FrameKind.TABLE_PULL,
                encode(RowBatch(table, count, copies=copied, version=version)),
                payload=(bytes_of(ids[part]),),
                into=(bytes_of(rows[part]),),
            )
            yield _Asked(link, start + first, link.post("rows", request))

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
            cursor = 0
            while chunk := self._get_chunk(link, table, cursor):
                yield chunk
                cursor = cursor_after(chunk)

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

    def _get_chunk(self, link: ServerLink, table: str, cursor: int) -> dict[str, Tensor] | None:
        """The next rows that were used; None after the last."""
        request = Request(
            FrameKind.TABLE_GET, encode(RowBatch(table, 0)), into=None, argument=cursor
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


def _take(requests: _Requests) -> tuple[Tensor, _Latest | None, bool]:
    """Take the answers: positions without a row, the newest hot set, and whether to choose one."""
    missing = []
    latest: _Latest | None = None
    refresh = False
    for each in requests.asked:
        answer = decode(each.reply.result().meta, RowsPulled)
        if answer.missing:
            missing.append(requests.order[each.start + torch.tensor(answer.missing)])
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
