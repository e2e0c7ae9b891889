"""The samples of a dataset, assigned to ranks; those of lost ranks are assigned to the others."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.data.sampling import BatchSplit, Collate, DatasetBatches, Loading


@dataclass(frozen=True)
class SampleAssignment:
    """Every batch of `samples`, in order, is split over `ranks`."""

    samples: Tensor  # their indices in the dataset
    ranks: tuple[int, ...]
    batch_size: int
    collate: Collate | None = None

    def batches(self, dataset: Any, rank: int) -> DatasetBatches:
        """The batches of one rank."""
        loading = Loading(self.batch_size, collate=self.collate)
        return DatasetBatches(dataset, self.samples, self._split(rank), loading)

    def samples_of(self, rank: int) -> Tensor:
        """The indices of the samples of one rank."""
        split = self._split(rank)
        batches = torch.split(self.samples, self.batch_size)
        return torch.cat(
            [batch[r.start : r.stop] for batch in batches for r in split.rows(len(batch))]
        )

    def without(self, missing: Collection[int]) -> SampleAssignment:
        """The samples of the missing ranks, assigned to the others."""
        lost = [self.samples_of(rank) for rank in missing]
        samples = torch.cat(lost) if lost else self.samples[:0]
        surviving = tuple(rank for rank in self.ranks if rank not in missing)
        return SampleAssignment(samples, surviving, self.batch_size, self.collate)

    def _split(self, rank: int) -> BatchSplit:
        return BatchSplit(self.ranks.index(rank), len(self.ranks))
