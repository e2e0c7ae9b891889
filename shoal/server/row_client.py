"""Rows of embedding tables on the servers, as a worker sees them (`embedding.store.RowStore`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from shoal.embedding.chunks import chunk_columns, cursor_after, entry_bytes, fit_chunks
from shoal.embedding.hashing import Ids
from shoal.embedding.pool import Column
from shoal.embedding.row_copy import copy_rows
from shoal.embedding.spec import TableSpec
from shoal.embedding.store import RowStore
from shoal.observe.trace import WAIT
from shoal.server.client import Client
from shoal.server.handlers.rows import MAX_ROW_BYTES
from shoal.server.hot_set import NO_ROWS, HotSet, fetch_hot, refresh_hot
from shoal.server.link import PostedRequest, ServerLink
from shoal.server.protocol.frames import FrameKind, Refused, decode, encode
from shoal.server.protocol.messages import RowBatch, RowChunk
from shoal.server.protocol.row_messages import RowsPulled, ShareRows
from shoal.server.request import Reply, Request
from shoal.server.row_cache import RowCache
from shoal.server.row_memory import PulledRows, RowMemories
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
    order: Ids  # their positions in the pull
    places: Ids  # where they go
    received: Tensor | None  # where they come to first; None: servers put them into their places

    def put_into(self, rows: Tensor) -> None:
        if self.received is not None:
            copy_rows(self.received, None, rows, self.places)


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
        is_shared = all(link.shares_rows for link in client.links)
        self._memories = RowMemories(self._share_memory if is_shared else None)

    def create(self, spec: TableSpec) -> None:
        if not self.specs:
            for link in self.client.links:
                link.open("rows")
        self.specs[spec.name] = spec
        self._steps.setdefault(spec.name, 0)
        if spec.cache_steps and self._rules is not None and self._rules.may_cache:
            self.caches[spec.name] = RowCache(spec.cache_steps, spec.num_rows)
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
        self.specs[table].check(ids)
        wanted = ids.contiguous().numpy()
        with self._memories.take(len(wanted), self.specs[table].dim) as pulled:
            cache = self.caches.get(table)
            if cache is None or self._wants_latest or not torch.is_grad_enabled():
                self._begin(table, wanted, np.arange(len(wanted)), pulled)()
            else:
                fetch = partial(self._begin_some, table, wanted, pulled)
                cache.pull(wanted, self._steps[table], pulled.rows, fetch)
        return pulled.rows

    def _begin_some(
        self, table: str, ids: Ids, pulled: PulledRows, places: Ids
    ) -> Callable[[], None]:
        return self._begin(table, ids[places], places, pulled)

    def _begin(self, table: str, ids: Ids, places: Ids, pulled: PulledRows) -> Callable[[], None]:
        """Ask for rows that go to these places; returns what waits until they are there."""
        owners = self.specs[table].locate(torch.from_numpy(ids), len(self.client.links))[0]
        targets = self._targets(table, ids, owners)
        requests = self._ask_for(table, ids, owners, targets, places, pulled)

        def wait() -> None:
            with self.client.tracer.span(WAIT, f"pull {len(ids)} rows of {table}"):
                missing, latest, refresh = _take(requests)
                requests.put_into(pulled.rows)
                if len(missing):
                    owned = owners[missing]
                    rest = self._ask_for(table, ids[missing], owned, owned, places[missing], pulled)
                    _take(rest)
                    rest.put_into(pulled.rows)
            self._follow_hot(table, latest, refresh)

        return wait

    def _follow_hot(self, table: str, latest: _Latest | None, refresh: bool) -> None:
        """Choose a set of hot rows if this worker is asked to; learn a newer one."""
        if self._rules is None or not self.copies_rows:
            return
        spec = self.specs[table]
        known = self._known(table)
        if refresh:
            self._hot[table] = refresh_hot(self.client, spec, known, self._rules.seen_by)
        elif latest is not None and latest.hot > known.number:
            self._hot[table] = fetch_hot(latest.link, spec)

    def _known(self, table: str) -> HotSet:
        return self._hot.get(table, NO_ROWS)

    def _targets(self, table: str, ids: Ids, owners: Ids) -> Ids:
        """The server to ask for each row."""
        hot = self._known(table)
        if self._rules is None or not len(hot.ids):
            return owners
        self._pulls += 1
        return spread(owners, hot.contains(ids), len(self.client.links), self._pulls)

    def _version(self) -> int:
        """The version that copies have at least."""
        if self._rules is None:
            return 0
        return max(0, self._rules.version() - (0 if self._wants_latest else self._rules.copy_lag))

    def _ask_for(
        self, table: str, ids: Ids, owners: Ids, targets: Ids, places: Ids, pulled: PulledRows
    ) -> _Requests:
        """Ask for rows, each of its target; copies come before rows that it owns."""
        servers = len(self.client.links)
        keys = 2 * targets + (owners == targets)
        counts = np.bincount(keys, minlength=2 * servers).reshape(servers, 2).tolist()
        order = np.argsort(keys.astype(np.uint16), kind="stable")
        ids, places = ids[order], places[order]
        received = (
            None if pulled.memory is not None else torch.empty(len(ids), pulled.rows.shape[1])
        )
        requests = _Requests([], order, places, received)
        start = 0
        for link, (copies, own) in zip(self.client.links, counts, strict=True):
            stop = start + copies + own
            batch = RowBatch(table, 0, copies=copies, version=self._version())
            requests.asked.extend(self._ask(link, batch, ids, requests, pulled, start, stop))
            start = stop
        return requests

    def _ask(
        self,
        link: ServerLink,
        batch: RowBatch,
        ids: Ids,
        requests: _Requests,
        pulled: PulledRows,
        start: int,
        stop: int,
    ) -> Iterator[_Asked]:
        """The requests to one server, of which the first rows are copies."""
        count, dim = pulled.rows.shape
        max_rows = max(1, MAX_ROW_BYTES // (16 + 4 * dim))
        for first in range(start, stop, max_rows):
            part = slice(first, min(stop, first + max_rows))
            copied = max(0, min(part.stop - first, batch.copies - (first - start)))
            payload = [_bytes(ids[part])]
            into: tuple[memoryview, ...] = ()
            message = replace(batch, count=part.stop - first, copies=copied)
            if requests.received is None:
                message = replace(message, memory=pulled.memory, places=count)
                payload.append(_bytes(requests.places[part]))
            else:
                into = (bytes_of(requests.received[part]),)
            request = Request(
                FrameKind.TABLE_PULL,
                encode(message),
                payload=tuple(payload),
                into=into,
                is_light=requests.received is None,
            )
            yield _Asked(link, first, link.post("rows", request))

    def _share_memory(self, number: int, descriptor: int) -> None:
        request = Request(FrameKind.SHARE_ROWS, encode(ShareRows(number)), descriptor=descriptor)
        for link in self.client.links:
            _ask(link, request)

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


def _take(requests: _Requests) -> tuple[Ids, _Latest | None, bool]:
    """Take the answers: positions without a row, the newest hot set, and whether to choose one."""
    missing = []
    latest: _Latest | None = None
    refresh = False
    for each in requests.asked:
        answer = decode(each.reply.result().meta, RowsPulled)
        if answer.missing:
            missing.append(requests.order[each.start + np.array(answer.missing)])
        if latest is None or answer.hot > latest.hot:
            latest = _Latest(answer.hot, each.link)
        refresh |= answer.refresh
    return np.concatenate([np.zeros(0, np.int64), *missing]), latest, refresh


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


def _bytes(numbers: Any) -> memoryview:
    """The memory of contiguous numbers."""
    return memoryview(numbers)


def _ask(link: ServerLink, request: Request) -> Reply:
    return link.post("rows", request).result()
