"""Rows that a worker has pulled and may use again for some steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.embedding.hashing import MAX_DIRECT_ROWS, Ids
from shoal.embedding.row_copy import copy_rows

# Begins to pull the rows at these positions; returns what waits for them.
Fetch = Callable[[Ids], Callable[[], None]]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class _Step(NamedTuple):
    """The first row that was kept in a step; rows are numbered in the order in which they came."""

    step: int
    first: int


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
        self._young: deque[_Step] = deque()
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
        self._forget(step)
        entries = self._entries(ids)
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
        return self._young[0].first if self._young else self._next

    def _forget(self, step: int) -> None:
        while self._young and self._young[0].step < step - self.steps:
            self._young.popleft()

    def _entries(self, ids: Ids) -> Ids:
        if self._is_direct:
            return ids
        return ((ids.astype(np.uint64) * _GOLDEN) >> np.uint64(64 - self._bits)).astype(np.int64)

    def _keep(self, ids: Ids, entries: Ids, step: int, rows: Tensor, places: Ids) -> None:
        """Put the rows at these places behind the others."""
        self._make_room(len(ids), rows.shape[1])
        if not self._young or self._young[-1].step != step:
            self._young.append(_Step(step, self._next))
        numbers = np.arange(self._next, self._next + len(ids))
        self._next += len(ids)
        copy_rows(rows, places, self._ring, self._slots(numbers))
        if not self._is_direct:  # one of those that collide has got the entry
            self._keys[entries] = ids + 1
            has_entry = self._keys[entries] == ids + 1
            entries, numbers = entries[has_entry], numbers[has_entry]
        self._numbers[entries] = numbers

    def _make_room(self, count: int, dim: int) -> None:
        """Rows that may be used stay where new ones come."""
        wanted = self._next - self._oldest + count
        if wanted <= self.capacity:
            return
        size = 1 << wanted.bit_length()
        ring = torch.empty(size, dim)
        young = np.arange(self._oldest, self._next)
        if len(young):
            copy_rows(self._ring, self._slots(young), ring, young & (size - 1))
        self._ring = ring
