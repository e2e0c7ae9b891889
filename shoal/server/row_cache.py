"""Rows that a worker has pulled and may use again for some steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from shoal.embedding.hashing import Ids

Pull = Callable[[Tensor], Tensor]
_NO_IDS: Ids = np.zeros(0, np.int64)


class RowCache:
    """A row that was pulled for step t is used up to step t + `steps`, then pulled again.

    All rows lie one after the other in `_rows`, and new ones behind them. Now and then those that
    are too old are left out. Each id has its latest place.
    """

    def __init__(self, steps: int):
        self.steps = steps
        self.hits = 0
        self.asked = 0
        self.clear()

    def clear(self) -> None:
        self._ids: Ids = _NO_IDS  # in ascending order
        self._places: Ids = _NO_IDS  # of their rows
        self._steps: Ids = _NO_IDS  # for which each was pulled
        self._rows = torch.empty(0, 0)
        self._used = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.asked if self.asked else 0.0

    def pull(self, ids: Tensor, step: int, pull: Pull) -> Tensor:
        """The rows of distinct ids; those that are not kept are pulled, and kept from now on."""
        wanted = ids.numpy()
        places = self._find(wanted, step)
        asked = np.flatnonzero(places < 0)
        self.hits += len(wanted) - len(asked)
        self.asked += len(wanted)
        if not len(asked) and len(self._rows):
            return self._rows.index_select(0, torch.from_numpy(places))
        new_ids = wanted[asked]
        new_rows = pull(torch.from_numpy(new_ids))
        if self._make_room(step, new_rows):
            places = self._find(wanted, step)
        places[asked] = self._keep(new_ids, step, new_rows)
        return self._rows.index_select(0, torch.from_numpy(places))

    def _find(self, ids: Ids, step: int) -> Ids:
        """The place of each row; -1 where it is not kept, or too old."""
        if not len(self._ids):
            return np.full(len(ids), -1)
        found = np.minimum(self._ids.searchsorted(ids), len(self._ids) - 1)
        is_kept = (self._ids[found] == ids) & (self._steps[found] >= step - self.steps)
        return np.where(is_kept, self._places[found], -1)

    def _keep(self, ids: Ids, step: int, rows: Tensor) -> Ids:
        """Put new rows behind the others; their places."""
        end = self._used + len(ids)
        places = np.arange(self._used, end)
        self._rows[self._used : end] = rows
        self._used = end
        is_replaced = np.isin(self._ids, ids, assume_unique=True)
        joined = np.concatenate([self._ids[~is_replaced], ids])
        order = np.argsort(joined, kind="stable")
        self._ids = joined[order]
        self._places = np.concatenate([self._places[~is_replaced], places])[order]
        self._steps = np.concatenate([self._steps[~is_replaced], np.full(len(ids), step)])[order]
        return places

    def _make_room(self, step: int, new_rows: Tensor) -> bool:
        """If the memory is full, leave out rows that are too old: whether rows have moved."""
        if self._used + len(new_rows) <= len(self._rows) and len(self._rows):
            return False
        is_young = self._steps >= step - self.steps
        kept = torch.from_numpy(self._places[is_young])
        rows = torch.empty(2 * (len(kept) + len(new_rows)), new_rows.shape[1])
        if len(kept):
            rows[: len(kept)] = self._rows.index_select(0, kept)
        self._ids = self._ids[is_young]
        self._steps = self._steps[is_young]
        self._places = np.arange(len(kept))
        self._rows = rows
        self._used = len(kept)
        return True
