"""Rows that a worker has pulled and may use again for some steps."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class _Pulled(NamedTuple):
    step: int
    ids: Tensor  # in ascending order
    rows: Tensor


class RowCache:
    """A row that was pulled for step t is used up to step t + `steps`, then pulled again."""

    def __init__(self, steps: int):
        self.steps = steps
        self.hits = 0
        self.asked = 0
        self._pulled: deque[_Pulled] = deque()

    @property
    def hit_rate(self) -> float:
        return self.hits / self.asked if self.asked else 0.0

    def get(self, ids: Tensor, step: int, rows: Tensor) -> Tensor:
        """Fill in the rows that are kept; whether each is."""
        while self._pulled and self._pulled[0].step < step - self.steps:
            self._pulled.popleft()
        is_kept = torch.zeros(len(ids), dtype=torch.bool)
        for pulled in reversed(self._pulled):
            places = np.searchsorted(pulled.ids.numpy(), ids.numpy())
            found = torch.from_numpy(np.minimum(places, len(pulled.ids) - 1))
            is_found = (pulled.ids[found] == ids) & ~is_kept
            rows[is_found] = pulled.rows[found[is_found]]
            is_kept |= is_found
        self.hits += int(is_kept.sum())
        self.asked += len(ids)
        return is_kept

    def put(self, ids: Tensor, step: int, rows: Tensor) -> None:
        """Rows that were pulled for `step`."""
        if len(ids):
            order = torch.argsort(ids)
            self._pulled.append(_Pulled(step, ids[order], rows[order]))

    def clear(self) -> None:
        self._pulled.clear()
