"""Rows of embedding tables on the servers, as a worker sees them (`embedding.module.RowStore`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.runtime.trace import WAIT
from shoal.server.client.client import Client
from shoal.server.client.link import ServerLink
from shoal.server.client.route import Reply, Request
from shoal.server.embedding.chunks import (
    columns_with,
    cursor_after,
    entry_bytes,
    fit_chunks,
    read_columns,
)
from shoal.server.embedding.hashing import MAX_DIRECT_ROWS, IdMap, Ids
from shoal.server.embedding.module import RowStore
from shoal.server.embedding.row_copy import copy_rows
from shoal.server.embedding.spec import TableSpec
from shoal.server.messages import Heat, HotRows, RowBatch, RowChunk, ShareRows
from shoal.server.model.hot_table import max_hot_rows
from shoal.server.process.rows_requests import MAX_ROW_BYTES
from shoal.server.protocol import FrameKind, Refused, decode, encode
from shoal.server.rows.memory import PulledRows, RowMemories
from shoal.server.rows.requests import RowRequests, hottest_rows, route
from shoal.server.shared_memory import bytes_of

# Begins to pull the rows at these positions; returns what waits for them.
Fetch = Callable[[Ids], Callable[[], None]]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class RowCache:
    """A row that was pulled for step t is used up to step t + `steps`, then pulled again.

    An id has one entry. In tables of up to a million rows each has an entry of its own; in others
    ids whose hashes collide displace each other. Row number n lies at n modulo the size of a ring,
    a power of two, which grows until it holds the rows of so many steps.
    """

    def __init__(self, steps: int, num_rows: int):
        self.steps = steps
        self.hits = 0
        self.asked = 0
        self._bits = (min(num_rows, MAX_DIRECT_ROWS) - 1).bit_length()
        self._is_direct = num_rows <= MAX_DIRECT_ROWS
        self.clear()

    def clear(self) -> None:
        """Keep nothing. Entries take memory from their first use on."""
        size = 1 << self._bits
        self._keys = np.zeros(0 if self._is_direct else size, np.int64)  # id + 1
        self._numbers = np.zeros(size, np.int64)  # of its row
        self._young: deque[tuple[int, int]] = deque()  # a step, and the first row kept in it
        self._ring = torch.empty(0, 0)
        self._next = 1  # the number of the next row

    @property
    def hit_rate(self) -> float:
        return self.hits / self.asked if self.asked else 0.0

    @property
    def capacity(self) -> int:
        """The rows for which there is memory."""
        return len(self._ring)

    def pull(self, ids: Ids, step: int, rows: Tensor, fetch: Fetch) -> None:
        """Fill in the rows of distinct ids; those that are not kept are pulled, and kept."""
        while self._young and self._young[0][0] < step - self.steps:
            self._young.popleft()
        entries = ids
        if not self._is_direct:
            hashed = ids.astype(np.uint64) * _GOLDEN
            entries = (hashed >> np.uint64(64 - self._bits)).astype(np.int64)
        numbers = self._numbers.take(entries)
        is_kept = numbers >= self._oldest
        if not self._is_direct:
            is_kept &= self._keys.take(entries) == ids + 1
        asked = np.flatnonzero(~is_kept)
        self.hits += len(ids) - len(asked)
        self.asked += len(ids)
        wait = fetch(asked)
        kept = np.flatnonzero(is_kept)
        if len(kept):
            copy_rows(self._ring, self._slots(numbers[kept]), rows, kept)
        wait()
        if len(asked):
            self._keep(ids[asked], entries[asked], step, rows, asked)

    def _slots(self, numbers: Ids) -> Ids:
        """Where rows with these numbers are in the ring."""
        slots: Ids = numbers & (self.capacity - 1)
        return slots

    @property
    def _oldest(self) -> int:
        """The number of the oldest row that may be used."""
        return self._young[0][1] if self._young else self._next

    def _keep(self, ids: Ids, entries: Ids, step: int, rows: Tensor, places: Ids) -> None:
        """Put the rows at these places behind the others; those that may be used stay."""
        wanted = self._next - self._oldest + len(ids)
        if wanted > self.capacity:
            size = 1 << wanted.bit_length()
            ring = torch.empty(size, rows.shape[1])
            young = np.arange(self._oldest, self._next)
            if len(young):
                copy_rows(self._ring, self._slots(young), ring, young & (size - 1))
            self._ring = ring
        if not self._young or self._young[-1][0] != step:
            self._young.append((step, self._next))
        numbers = np.arange(self._next, self._next + len(ids))
        self._next += len(ids)
        copy_rows(rows, places, self._ring, self._slots(numbers))
        if not self._is_direct:  # one of those that collide has got the entry
            self._keys[entries] = ids + 1
            has_entry = self._keys[entries] == ids + 1
            entries = entries[has_entry]
            numbers = numbers[has_entry]
        self._numbers[entries] = numbers


class HotSet(NamedTuple):
    """Ids in ascending order, and the number of the set: the newest one holds."""

    number: int
    known: IdMap


NO_ROWS = HotSet(0, IdMap(np.zeros(0, np.int64), 0))


def fetch_hot(link: ServerLink, spec: TableSpec) -> HotSet:
    """The present set of a server; empty while its rows are not published."""
    meta, payload = _ask_about(link, FrameKind.TABLE_HOT_GET, spec.name)
    answer = decode(meta, HotRows)
    ids = _numbers(payload, answer.count)
    spec.check(torch.from_numpy(ids))
    is_coming = answer.count > 0 and not answer.publish
    return NO_ROWS if is_coming else HotSet(answer.number, IdMap(ids, spec.num_rows))


def refresh_hot(
    client: Client, spec: TableSpec, hot: HotSet, seen_by: Callable[[int], list[str]]
) -> HotSet:
    """Choose the rows over the share of all pulls, from the counts of all servers.

    `hot` is the present set. First every server learns the set, then the owners publish their rows.
    """
    found = [_counts(link, spec.name) for link in client.links]
    total = sum(heat.total for heat, _, _ in found)
    ids = hottest_rows(
        np.concatenate([ids for _, ids, _ in found]),
        np.concatenate([counts for _, _, counts in found]),
        spec.hot_share * total,
        max_hot_rows(spec),
        hot.known.ids,
    )
    workers = client.specs[0].rule.workers
    latest = max(heat.hot for heat, _, _ in found)
    number = (latest // workers + 1) * workers + client.rank  # no two workers have the same
    is_same = np.array_equal(ids, hot.known.ids)
    chosen = hot if is_same else HotSet(number, IdMap(ids, spec.num_rows))
    for publish in (False, True):
        for index, link in enumerate(client.links):
            addresses = () if publish else tuple(seen_by(index))
            message = HotRows(spec.name, chosen.number, len(ids), publish, addresses)
            payload = (bytes_of(torch.from_numpy(ids)),)
            _ask(link, Request(FrameKind.TABLE_HOT_SET, encode(message), payload))
    return chosen


def _counts(link: ServerLink, table: str) -> tuple[Heat, Ids, Ids]:
    meta, payload = _ask_about(link, FrameKind.TABLE_HEAT, table)
    heat = decode(meta, Heat)
    numbers = _numbers(payload, 2 * heat.count)
    return heat, numbers[: heat.count], numbers[heat.count :]


def _numbers(payload: bytearray, count: int) -> Ids:
    if len(payload) != 8 * count:
        raise Refused(f"{len(payload)} bytes for {count} numbers")
    return np.frombuffer(payload, np.int64)


@dataclass(frozen=True)
class RowRules:
    """What a strategy allows for rows that are not asked of their owner.

    `version` is that of the weights that the worker has, and copies may be `copy_lag` versions
    older. Where the result of one device is promised, workers keep no rows.
    """

    version: Callable[[], int] = lambda: 0
    seen_by: Callable[[int], list[str]] = lambda index: []  # all servers, as one reaches them
    copy_lag: int = 0
    may_cache: bool = False
    may_copy: bool = False  # copies of a server serve pulls already


class ServerStore(RowStore):
    """Tables on the servers of one model, as a worker sees them."""

    def __init__(self, client: Client, rules: RowRules | None = None):
        """Without rules all rows are asked of their owners."""
        self.client = client
        self.tables: dict[str, ServerTable] = {}
        self.rules = rules or RowRules()
        self.wants_latest = False
        self.pulls = client.rank  # servers are asked for hot rows in another order each time
        is_shared = all(link.shares_rows for link in client.links)
        self.memories = RowMemories(self._share_memory if is_shared else None)

    def create(self, spec: TableSpec) -> ServerTable:
        if not self.tables:
            for link in self.client.links:
                link.open("rows")
        for link in self.client.links:
            _ask(link, Request(FrameKind.TABLE_MAKE, encode(spec)))
        before = self.tables.get(spec.name)
        table = self.tables[spec.name] = ServerTable(self, spec)
        if before is not None:
            table.pushes = before.pushes
            table.steps = before.steps
            table.hot = before.hot
        return table

    @contextmanager
    def latest(self) -> Iterator[None]:
        """While the block runs, rows are as new as the weights of the worker."""
        self.wants_latest = True
        try:
            yield
        finally:
            self.wants_latest = False

    def _share_memory(self, number: int, descriptor: int) -> None:
        request = Request(FrameKind.SHARE_ROWS, encode(ShareRows(number)), descriptor=descriptor)
        for link in self.client.links:
            _ask(link, request)


class ServerTable:
    """Each server holds the rows whose ids are assigned to it, and copies of hot rows.

    A pull costs one request per server. A push is sent with the push of the step, and counts if
    that one does.
    """

    def __init__(self, store: ServerStore, spec: TableSpec):
        self.spec = spec
        self.steps = 0  # by all workers, at the latest `state`
        self.pushes = 0  # by this worker
        self.hot = NO_ROWS
        self.cache: RowCache | None = None
        if spec.cache_steps and store.rules.may_cache:
            self.cache = RowCache(spec.cache_steps, spec.num_rows)
        self._store = store
        self._client = store.client
        self._links = store.client.links

    def pull(self, ids: Tensor) -> Tensor:
        cache = self.cache
        if cache is None or self._store.wants_latest or not torch.is_grad_enabled():
            self.spec.check_type(ids)  # `route` checks the range
            cache = None
        else:
            self.spec.check(ids)
        wanted = ids.contiguous().numpy()
        begun: list[RowRequests] = []
        with self._store.memories.take(len(wanted), self.spec.dim) as pulled:
            try:
                if cache is None:
                    self._begin(wanted, None, pulled, begun)()
                else:  # pull what it does not keep

                    def fetch(places: Ids) -> Callable[[], None]:
                        return self._begin(wanted[places], places, pulled, begun)

                    cache.pull(wanted, self.pushes, pulled.rows, fetch)
            except BaseException as error:
                for requests in begun:
                    requests.abandon(error)
                raise
        return pulled.rows

    def _begin(
        self, ids: Ids, places: Ids | None, pulled: PulledRows, begun: list[RowRequests]
    ) -> Callable[[], None]:
        """Ask for rows that go to these places; returns what waits until they are there."""
        links = self._links
        spec = self.spec
        store = self._store
        store.pulls += 1
        routed = route(spec, ids, places, len(links), self.hot.known, store.pulls)
        lag = 0 if store.wants_latest else store.rules.copy_lag
        version = max(0, store.rules.version() - lag)  # that copies have at least
        requests = RowRequests(links, spec.name, routed, pulled, version)
        begun.append(requests)

        def wait() -> None:
            with self._client.tracer.span(WAIT, f"pull {len(ids)} rows of {spec.name}"):
                answered = requests.wait()
                if len(answered.missing):
                    of_owners = route(
                        spec,
                        routed.ids[answered.missing],
                        routed.places[answered.missing],
                        len(links),
                        NO_ROWS.known,
                        0,
                    )
                    RowRequests(links, spec.name, of_owners, pulled, version).wait()
            if store.rules.may_copy and answered.refresh:  # this worker is asked to choose
                self.hot = refresh_hot(self._client, spec, self.hot, store.rules.seen_by)
            elif store.rules.may_copy and answered.hot > self.hot.number:
                self.hot = fetch_hot(answered.link, spec)

        return wait

    def push(self, ids: Tensor, grads: Tensor, lr: float, step: int) -> None:
        """A server that holds none of the rows receives an empty push: it counts updates."""
        self.pushes += 1  # rows that are kept are a step older
        owners = self.spec.owner(ids, len(self._links))
        for index, link in enumerate(self._links):
            positions = torch.nonzero(owners == index).flatten()
            request = Request(
                FrameKind.TABLE_PUSH,
                encode(RowBatch(self.spec.name, len(positions), lr)),
                payload=(bytes_of(ids[positions]), bytes_of(grads[positions].contiguous())),
                sequence=self._client.sequence + 1,
                is_answered=False,
            )
            link.post("push", request)

    def state(self) -> Iterator[dict[str, Tensor]]:
        """The rows that were used, in chunks."""
        self.steps = 0
        spec = self.spec
        for link in self._links:
            cursor = 0
            while True:
                answer = _ask_about(link, FrameKind.TABLE_GET, spec.name, cursor)
                chunk = decode(answer.meta, RowChunk)
                self.steps = max(chunk.steps, self.steps)
                if not chunk.keys:  # after the last
                    break
                columns = columns_with(spec, spec.optimizer, chunk.keys)
                if not columns or len(answer.payload) != chunk.count * entry_bytes(columns):
                    raise Refused(f"a chunk of {spec.name!r} is not as its header says")
                rows = read_columns(columns, chunk.count, answer.payload)
                yield rows
                cursor = cursor_after(rows)

    def load_state(self, chunks: Iterable[dict[str, Tensor]], steps: int) -> None:
        """The lowest surviving worker loads for all; it takes effect at the next barrier."""
        if self.cache is not None:
            self.cache.clear()
        if self._client.rank != self._client.lowest_survivor:
            return
        spec = self.spec
        loaded = list(chunks)
        for link in self._links:
            meta = encode(RowChunk(spec.name, 0, (), steps))
            _ask(link, Request(FrameKind.TABLE_SET, meta))
            fitted = (fit_chunks(spec, spec.optimizer, chunk, steps) for chunk in loaded)
            for part in chain.from_iterable(fitted):
                first, *keys = part
                row_bytes = sum(tensor[:1].nbytes for tensor in part.values())
                max_rows = max(1, MAX_ROW_BYTES // max(1, row_bytes))
                for positions in torch.split(torch.arange(len(part[first])), max_rows):
                    tensors = [tensor[positions].contiguous() for tensor in part.values()]
                    meta = encode(RowChunk(spec.name, len(positions), tuple(keys), steps))
                    _ask(link, Request(FrameKind.TABLE_SET, meta, tuple(map(bytes_of, tensors))))


def _ask_about(link: ServerLink, kind: FrameKind, table: str, cursor: int = 0) -> Reply:
    return _ask(link, Request(kind, encode(RowBatch(table, 0)), into=None, argument=cursor))


def _ask(link: ServerLink, request: Request) -> Reply:
    return link.post("rows", request).result()
