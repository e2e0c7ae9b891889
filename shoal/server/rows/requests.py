"""The requests of one pull of rows: one to each server that is asked for some of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.server.client.link import PostedRequest, ServerExchange, ServerLink, begin_exchange
from shoal.server.client.route import Request
from shoal.server.embedding import native
from shoal.server.embedding.hashing import IdMap, Ids
from shoal.server.embedding.row_copy import copy_rows
from shoal.server.embedding.spec import TableSpec
from shoal.server.messages import RowBatch, RowsPulled
from shoal.server.process.rows_requests import MAX_ROW_BYTES
from shoal.server.protocol import FrameKind, decode, encode
from shoal.server.rows.memory import PulledRows
from shoal.server.shared_memory import bytes_of

Numbers = NDArray[np.int64]
_AS_GOOD = 0.97  # of the pulls that a new set would have
_AS_SMALL = 1.25  # times as many rows


class Routed(NamedTuple):
    """The rows of a pull in the order in which servers are asked for them."""

    ids: Ids
    places: Ids  # where they go
    counts: list[int]  # of each server in turn: copies, and then rows that it owns


def route(
    spec: TableSpec, ids: Ids, places: Ids | None, servers: int, hot: IdMap, turn: int
) -> Routed:
    """The requests of a pull. `places=None`: 0, 1, 2, …; BadInput for ids out of range."""
    is_hashed = spec.placement == "hash" and servers > 1
    has_list = len(hot.ids) > 0 and hot.direct is None
    if is_hashed or has_list:
        spec.check(torch.from_numpy(ids))
    width = -(-spec.num_rows // servers)
    owners = spec.locate(torch.from_numpy(ids), servers)[0] if is_hashed else None
    is_hot = hot.find(ids) >= 0 if has_list else None
    ordered = np.empty_like(ids)
    ordered_places = np.empty_like(ids)
    counts = np.empty(2 * servers, np.int64)
    if (
        native.rows.route(
            ids,
            places,
            spec.num_rows,
            width,
            owners,
            hot.direct,
            is_hot,
            turn,
            ordered,
            ordered_places,
            counts,
        )
        >= 0
    ):
        spec.check(torch.from_numpy(ids))
    return Routed(ordered, ordered_places, counts.tolist())


def hottest_rows(ids: Ids, counts: Numbers, least: float, most_rows: int, hot: Ids) -> Ids:
    """The ids whose counts add up to more than `least`, in order; at most so many of them.

    Half of it keeps those that are `hot` now, so that few rows come and go by chance. All of them
    stay where the new ones are pulled hardly more often: a new set is copied to every server.
    """
    unique, inverse = np.unique(ids, return_inverse=True)
    sums = np.bincount(inverse, counts, minlength=len(unique))
    is_hot = np.isin(unique, hot, assume_unique=True)
    ranks = sums * (1 + is_hot)
    order = np.argsort(-ranks, kind="stable")[:most_rows]
    chosen = order[ranks[order] > least]
    is_as_good = sums[is_hot].sum() >= _AS_GOOD * sums[chosen].sum() > 0
    if is_as_good and len(hot) <= _AS_SMALL * len(chosen):
        return hot.copy()
    return np.sort(unique[chosen])


_AT_ONCE_ROWS = 100_000  # of one server: an answer that names all of them as missing is short


class Answered(NamedTuple):
    """What the servers say about a pull."""

    missing: Ids  # positions, in the order of requests, of rows that did not come
    hot: int  # the newest set of hot rows
    link: ServerLink  # a server that has it
    refresh: bool  # whether this worker is asked to choose the next one


class _Part(NamedTuple):
    """Rows that one request asks for; the first `copies` of them are copies."""

    link: ServerLink
    start: int
    stop: int
    copies: int


@dataclass(eq=False)
class RowRequests:
    """Rows that are on their way. `wait` returns when they are in their places."""

    _links: Sequence[ServerLink]
    _table: str
    _routed: Routed
    _pulled: PulledRows
    _version: int

    def __post_init__(self) -> None:
        self._parts = list(self._split())
        self._posted: list[PostedRequest] = []
        self._room: Tensor | None = None  # where rows come to first, if they do
        is_small = all(part.stop - part.start <= _AT_ONCE_ROWS for part in self._parts)
        self._exchange: ServerExchange | None = None
        if is_small and len(self._parts) <= len(self._links):  # each server answers in one frame
            asked = [(part.link, self._request(part)) for part in self._parts]
            self._exchange = begin_exchange(asked, "rows")
        if self._exchange is None:
            self._posted = [self._post(part) for part in self._parts]

    def wait(self) -> Answered:
        """Asks again where a connection broke."""
        rows = self._pulled.rows
        places = self._routed.places
        if self._exchange is None:
            metas = [posted.result().meta for posted in self._posted]
            if self._room is not None:
                copy_rows(self._room, None, rows, places)
            return self._answered(metas)
        of_parts = [places[part.start : part.stop] for part in self._parts]
        found = self._exchange.answers(None if self._is_shared else rows.numpy(), of_parts)
        metas = []
        for part, where, meta in zip(self._parts, of_parts, found, strict=True):
            if meta is None:
                meta = self._post(part).result().meta
                copy_rows(self._received[part.start : part.stop], None, rows, where)
            metas.append(meta)
        return self._answered(metas)

    def abandon(self, error: BaseException) -> None:
        """The rows are not waited for."""
        if self._exchange is not None:
            self._exchange.abandon(error)

    @property
    def _is_shared(self) -> bool:
        """Whether servers put rows into their places."""
        return self._pulled.memory is not None

    @property
    def _received(self) -> Tensor:
        """Where rows come to first, in the order of requests."""
        if self._room is None:
            self._room = torch.from_numpy(
                self._pulled.buffer.rows(len(self._routed.ids), self._pulled.rows.shape[1])
            )
        return self._room

    def _post(self, part: _Part) -> PostedRequest:
        request = self._request(part)
        if not self._is_shared:
            into = bytes_of(self._received[part.start : part.stop])
            request = replace(request, into=(into,))
        return part.link.post("rows", request)

    def _split(self) -> Iterator[_Part]:
        max_rows = max(1, MAX_ROW_BYTES // (16 + 4 * self._pulled.rows.shape[1]))
        counts = iter(self._routed.counts)
        start = 0
        for link, copies, owned in zip(self._links, counts, counts, strict=True):
            stop = start + copies + owned
            for first in range(start, stop, max_rows):
                last = min(stop, first + max_rows)
                yield _Part(link, first, last, max(0, min(last, start + copies) - first))
            start = stop

    def _request(self, part: _Part) -> Request:
        routed = self._routed
        memory = self._pulled.memory
        numbers: tuple[Any, ...] = (routed.ids, routed.places) if self._is_shared else (routed.ids,)
        room = len(self._pulled.rows) if self._is_shared else 0
        count = part.stop - part.start
        message = RowBatch(self._table, count, 0.0, part.copies, self._version, memory, room)
        payload = tuple(memoryview(each[part.start : part.stop]) for each in numbers)
        return Request(FrameKind.TABLE_PULL, encode(message), payload)

    def _answered(self, metas: Sequence[bytes]) -> Answered:
        missing: list[Any] = []
        hot = -1
        link = self._links[0]
        refresh = False
        for part, meta in zip(self._parts, metas, strict=True):
            answer = decode(meta, RowsPulled)
            if answer.missing:
                missing.append(part.start + np.array(answer.missing))
            if answer.hot > hot:
                hot = answer.hot
                link = part.link
            refresh |= answer.refresh
        found = np.concatenate(missing) if missing else np.zeros(0, np.int64)
        return Answered(found, hot, link, refresh)
