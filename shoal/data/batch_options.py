"""The options of `job.batches`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shoal.data.sampling import Collate, Loading


@dataclass(frozen=True)
class BatchOptions:
    """`job.batches` documents them."""

    batch_size: int | None = None
    epochs: int = 1
    steps: int | None = None
    shuffle: bool = True
    drop_last: bool = False
    collate: Collate | None = None
    loaders: int = 0
    sampler: Iterable[Any] | None = None

    def loading(self, loader_seed: int, sample_seed: int) -> Loading:
        assert self.batch_size is not None
        return Loading(
            self.batch_size, self.drop_last, self.collate, self.loaders, loader_seed, sample_seed
        )

    def batches_in(self, num_samples: int) -> int:
        assert self.batch_size is not None
        if self.drop_last:
            return num_samples // self.batch_size
        return -(-num_samples // self.batch_size)
