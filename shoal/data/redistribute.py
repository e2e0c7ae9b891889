"""Samples dealt out to ranks, and dealt out again when some of the ranks are lost."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.data.sampling import Cut, DatasetBatches


@dataclass(frozen=True)
class Deal:
    """Every batch of `samples`, in order, is cut into a part for each of `ranks`."""

    samples: Tensor  # their numbers in the dataset
    ranks: tuple[int, ...]
    batch_size: int

    def batches(self, dataset: Any, rank: int) -> DatasetBatches:
        """The parts of one rank."""
        return DatasetBatches(dataset, self.batch_size, self._cut(rank), self.samples)

    def samples_of(self, rank: int) -> Tensor:
        """The samples in the parts of one rank."""
        batches = torch.split(self.samples, self.batch_size)
        return torch.cat(
            [batch[r.start : r.stop] for batch in batches for r in self._rows(rank, batch)]
        )

    def without(self, missing: Collection[int]) -> Deal:
        """What the missing ranks had, dealt out to the others."""
        parts = [self.samples_of(rank) for rank in missing]
        left = torch.cat(parts) if parts else self.samples[:0]
        ranks = tuple(rank for rank in self.ranks if rank not in missing)
        return Deal(left, ranks, self.batch_size)

    def _rows(self, rank: int, batch: Tensor) -> list[range]:
        return self._cut(rank).rows(len(batch))

    def _cut(self, rank: int) -> Cut:
        return Cut(self.ranks.index(rank), len(self.ranks))
