"""How often rows are pulled, in bounded memory: the space-saving sketch.

Of m counters, each belongs to one id. When an id comes that has none, it takes over the smallest
counter: its count is too large by at most that count, which is kept as its error (Metwally,
Agrawal, El Abbadi: Efficient computation of frequent and top-k elements in data streams, 2005).
After n ids:

    count - error <= true count <= count        for ids with a counter
    true count <= smallest counter <= n / m     for all others

Ids are counted in batches, which is faster and keeps both lines. In a batch each id without a
counter gets one, with the smallest count so far as its error; then the m largest stay. What u new
ids add to the sum of counters, u times the smallest, is at most what the u counters that go take
with them. So the sum is at most n, and the smallest of m counters at most n / m.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.server.embedding import native
from shoal.server.embedding.hashing import MAX_DIRECT_ROWS, Ids

Numbers = NDArray[np.int64]
_NONE: Numbers = np.zeros(0, np.int64)
_WIDE = 8  # times as many possible ids as ids: then sorting them is faster than counting


class IdCounts:
    """Ids of a table, counted in batches. A batch of a table of up to a million rows has no limit.

    There, an id costs one addition when it comes. Ids of larger tables are kept until `take`.
    """

    def __init__(self, num_rows: int | None = None):
        """`num_rows=None`: ids of any size."""
        self.size = 0  # ids that came
        self.is_direct = num_rows is not None and num_rows <= MAX_DIRECT_ROWS
        self._num_rows = num_rows or 0
        self._counts = _NONE
        self._kept: list[Ids] = []

    def add(self, ids: Ids, is_counted: bool = False) -> None:
        """These ids came. An IndexError if one is not of the table.

        `is_counted`: they are in `array` already, if there is one.
        """
        if not self.is_direct:
            self._kept.append(ids.copy())
        elif not is_counted:
            self._count(ids)
        self.size += len(ids)

    @property
    def array(self) -> Numbers | None:
        """The count of each id, for one that counts by itself; None for large tables."""
        if self.is_direct and not len(self._counts):
            self._counts = np.zeros(self._num_rows, np.int64)  # takes memory where ids come
        return self._counts if self.is_direct else None

    def _count(self, ids: Ids) -> None:
        assert self.array is not None
        if (wrong := native.rows.count_ids(self._counts, ids)) >= 0:
            raise IndexError(f"id {wrong} of {len(ids)} is not of the table")

    def take(self) -> tuple[Ids, Numbers]:
        """Each id once, in ascending order, and how often it came; then counts begin again."""
        if not self.size:
            return _NONE, _NONE
        if self.is_direct:
            ids = np.flatnonzero(self._counts)
            counts = self._counts[ids]
            self._counts[ids] = 0
        else:
            ids, counts = _counted(np.concatenate(self._kept))
            self._kept = []
        self.size = 0
        return ids, counts


def _counted(ids: Ids) -> tuple[Ids, Numbers]:
    low = int(ids.min())
    high = int(ids.max())
    if high - low < _WIDE * len(ids):
        counts = np.bincount(ids - low)
        found = np.flatnonzero(counts)
        return found + low, counts[found]
    unique, counts = np.unique(ids, return_counts=True)
    return unique, counts.astype(np.int64)


_MIN_BATCH = 1 << 15


class Hottest(NamedTuple):
    """Ids with their counts, the largest first, and by how much a count may be too large."""

    ids: Ids
    counts: Numbers
    errors: Numbers


class SpaceSaving:
    """Numbers of the most frequent ids of a stream, with at most `capacity` counters.

    `num_rows`: ids are below it. If they are few, a batch lasts until counts are asked for.
    """

    def __init__(self, capacity: int, num_rows: int | None = None):
        self.capacity = capacity
        self._total = 0
        self._ids: Ids = _NONE  # in ascending order
        self._counts: Numbers = _NONE
        self._errors: Numbers = _NONE
        self.floor = 0  # no id without a counter came more often
        self._batch = IdCounts(num_rows)

    @property
    def total(self) -> int:
        return self._total + self._batch.size

    @property
    def array(self) -> Numbers | None:
        """The count of each id that waits to be counted (`IdCounts.array`)."""
        return self._batch.array

    def add(self, ids: Ids, is_counted: bool = False) -> None:
        """These ids came; `is_counted`: they are in the array already, if there is one."""
        self._batch.add(ids, is_counted)
        if not self._batch.is_direct and self._batch.size >= max(_MIN_BATCH, self.capacity):
            self._settle()

    def merge(self, other: SpaceSaving) -> None:
        """Count what another sketch has counted. The bounds of both add up."""
        self._settle()
        other._settle()
        self._total += other._total
        self._join(other._ids, other._counts, other._errors, other.floor)

    def counted(self) -> Hottest:
        """All ids with a counter, in ascending order."""
        self._settle()
        return Hottest(self._ids, self._counts, self._errors)

    def hottest(self, number: int | None = None) -> Hottest:
        """The ids with the largest counts; of equal counts, the smaller id first."""
        self._settle()
        order = np.lexsort((self._ids, -self._counts))[:number]
        return Hottest(self._ids[order], self._counts[order], self._errors[order])

    def _settle(self) -> None:
        if self._batch.size:
            self._total += self._batch.size
            ids, counts = self._batch.take()
            self._join(ids, counts, np.zeros(len(ids), np.int64), 0)

    def _join(self, ids: Ids, counts: Numbers, errors: Numbers, floor: int) -> None:
        """Add counters; ids without one came at most `floor` times on that side."""
        places, is_known = _look_up(self._ids, ids)
        own_counts = self._counts + floor
        own_errors = self._errors + floor
        own_counts[places[is_known]] += counts[is_known] - floor
        own_errors[places[is_known]] += errors[is_known] - floor
        joined = np.concatenate([self._ids, ids[~is_known]])
        order = np.argsort(joined, kind="stable")  # two runs that are in order
        joined = joined[order]
        all_counts = np.concatenate([own_counts, counts[~is_known] + self.floor])[order]
        all_errors = np.concatenate([own_errors, errors[~is_known] + self.floor])[order]
        self.floor += floor
        kept = np.arange(len(joined))
        if len(joined) > self.capacity:
            order = np.argpartition(-all_counts, self.capacity - 1)
            self.floor = max(self.floor, int(all_counts[order[self.capacity :]].max()))
            kept = np.sort(order[: self.capacity])
        self._ids = joined[kept]
        self._counts = all_counts[kept]
        self._errors = all_errors[kept]


def _look_up(ordered: Ids, ids: Ids) -> tuple[Ids, NDArray[np.bool_]]:
    """Where ids are among ordered ones, and whether each is there."""
    if not len(ordered):
        return np.zeros(len(ids), np.int64), np.zeros(len(ids), np.bool_)
    places = np.minimum(ordered.searchsorted(ids), len(ordered) - 1)
    return places, ordered[places] == ids
