"""The requests of one pull of rows: one to each server that is asked for some of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.embedding.hashing import Ids
from shoal.embedding.row_copy import copy_rows
from shoal.protocol.frames import FrameKind, decode, encode
from shoal.server.client import exchange
from shoal.server.client.link import PostedRequest, ServerLink
from shoal.server.client.route import Request
from shoal.server.messages import RowBatch, RowsPulled
from shoal.server.process.rows_requests import MAX_ROW_BYTES
from shoal.server.rows.memory import PulledRows
from shoal.server.rows.routing import Routed
from shoal.server.shared_memory import bytes_of

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


class RowRequests:
    """Rows that are on their way. `wait` returns when they are in their places."""

    def __init__(
        self,
        links: Sequence[ServerLink],
        table: str,
        routed: Routed,
        pulled: PulledRows,
        version: int,
    ):
        self._links = links
        self._table = table
        self._routed = routed
        self._pulled = pulled
        self._version = version
        self._parts = list(self._split())
        self._posted: list[PostedRequest] = []
        self._room: Tensor | None = None  # where rows come to first, if they do
        self._exchange = self._begin() if self._is_short else None
        if self._exchange is None:
            self._posted = [self._post(part) for part in self._parts]

    def wait(self) -> Answered:
        if self._exchange is not None:
            return self._answered(self._exchanged(self._exchange))
        metas = [posted.result().meta for posted in self._posted]
        if self._room is not None:
            copy_rows(self._room, None, self._pulled.rows, self._routed.places)
        return self._answered(metas)

    def _exchanged(self, begun: exchange.ServerExchange) -> list[bytes]:
        """The answers, with all rows in their places; asks again where a connection broke."""
        rows = self._pulled.rows
        places = [self._routed.places[part.start : part.stop] for part in self._parts]
        found = begun.metas() if self._is_shared else begun.rows(rows.numpy(), places)
        metas = []
        for part, where, meta in zip(self._parts, places, found, strict=True):
            if meta is None:
                meta = self._post(part).result().meta
                copy_rows(self._received[part.start : part.stop], None, rows, where)
            metas.append(meta)
        return metas

    def abandon(self, error: BaseException) -> None:
        """The rows are not waited for."""
        if self._exchange is not None:
            self._exchange.abandon(error)

    @property
    def _is_short(self) -> bool:
        """Whether each server gets one request, and can answer it in one frame."""
        is_small = all(part.stop - part.start <= _AT_ONCE_ROWS for part in self._parts)
        return is_small and len(self._parts) <= len(self._links)

    @property
    def _is_shared(self) -> bool:
        """Whether servers put rows into their places."""
        return self._pulled.memory is not None

    @property
    def _received(self) -> Tensor:
        """Where rows come to first, in the order of requests."""
        if self._room is None:
            size = (len(self._routed.ids), self._pulled.rows.shape[1])
            self._room = torch.from_numpy(self._pulled.buffer.rows(*size))
        return self._room

    def _begin(self) -> exchange.ServerExchange | None:
        return exchange.begin([(part.link, self._request(part)) for part in self._parts], "rows")

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
        count = part.stop - part.start
        of_part = slice(part.start, part.stop)
        ids = _bytes(self._routed.ids[of_part])
        if not self._is_shared:
            message = RowBatch(self._table, count, copies=part.copies, version=self._version)
            return Request(FrameKind.TABLE_PULL, encode(message), (ids,))
        message = RowBatch(
            self._table,
            count,
            copies=part.copies,
            version=self._version,
            memory=self._pulled.memory,
            places=len(self._pulled.rows),
        )
        places = _bytes(self._routed.places[of_part])
        return Request(FrameKind.TABLE_PULL, encode(message), (ids, places))

    def _answered(self, metas: Sequence[bytes]) -> Answered:
        missing: list[Any] = []
        hot, link, refresh = -1, self._links[0], False
        for part, meta in zip(self._parts, metas, strict=True):
            answer = decode(meta, RowsPulled)
            if answer.missing:
                missing.append(part.start + np.array(answer.missing))
            if answer.hot > hot:
                hot, link = answer.hot, part.link
            refresh |= answer.refresh
        found = np.concatenate(missing) if missing else np.zeros(0, np.int64)
        return Answered(found, hot, link, refresh)


def _bytes(numbers: Any) -> memoryview:
    """The memory of contiguous numbers."""
    return memoryview(numbers)
