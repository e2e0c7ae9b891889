"""How often ids came since they were asked for: an array where the table is small, else a list."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.embedding.hashing import Ids
from shoal.embedding.id_map import MAX_DIRECT_ROWS

try:
    from shoal.embedding._rows import count_ids as _native
except ImportError:  # Shoal was installed without a compiler, or is newer than its native part
    _native = None  # type: ignore[assignment]

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

    def add(self, ids: Ids) -> None:
        """These ids came. An IndexError if one is not of the table."""
        if self.is_direct:
            self._count(ids)
        self.note(ids)

    @property
    def array(self) -> Numbers | None:
        """The count of each id, for one that counts by itself (`note`); None for large tables."""
        if self.is_direct and not len(self._counts):
            self._counts = np.zeros(self._num_rows, np.int64)  # takes memory where ids come
        return self._counts if self.is_direct else None

    def note(self, ids: Ids) -> None:
        """These ids came, and are counted in the array if there is one."""
        if not self.is_direct:
            self._kept.append(ids.copy())
        self.size += len(ids)

    def _count(self, ids: Ids) -> None:
        assert self.array is not None
        if _native is None:
            if len(ids) and not 0 <= ids.min() <= ids.max() < self._num_rows:
                raise IndexError(f"an id of {len(ids)} is not of the table")
            np.add.at(self._counts, ids, 1)
        elif (wrong := _native(self._counts, ids)) >= 0:
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
    low, high = int(ids.min()), int(ids.max())
    if high - low < _WIDE * len(ids):
        counts = np.bincount(ids - low)
        found = np.flatnonzero(counts)
        return found + low, counts[found]
    unique, counts = np.unique(ids, return_counts=True)
    return unique, counts.astype(np.int64)
