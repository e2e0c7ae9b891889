"""Data in an order of its own: samplers of the script, and datasets without indices.

Both are given as for one device: every replica goes over all of it, and takes its rows of each
global batch. What they draw from the global generators follows from seed and epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset, default_collate

from shoal.data.batch import AnyBatch, batch_of
from shoal.data.rows import take
from shoal.data.sample_seeds import mix, restored_generators, seed_everything
from shoal.data.sampling import BatchSplit, Collate
from shoal.errors import BadInput


def is_stream(data: Any) -> bool:
    """Whether samples come one after the other: an IterableDataset of torch or Hugging Face."""
    if isinstance(data, IterableDataset):
        return True
    return any(base.__name__ == "IterableDataset" for base in type(data).__mro__)


def check_sampler(sampler: Any) -> None:
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise BadInput(
            "the sampler of job.batches chooses samples as for one device, and a "
            "DistributedSampler those of one worker: leave it out, job.batches shuffles and divides"
        )
    if not isinstance(sampler, Iterable):
        raise BadInput(f"a sampler is an iterable of indices, and {type(sampler).__name__} is not")


def draw_order(sampler: Iterable[Any], most: int | None, num_samples: int, seed: int) -> Tensor:
    """The indices of one epoch; at most so many, where a sampler may have no end."""
    with restored_generators():
        seed_everything(seed)
        indices = list(islice(sampler, most))
    if not all(_is_index(index, num_samples) for index in indices):
        bad = next(index for index in indices if not _is_index(index, num_samples))
        if isinstance(bad, (list, tuple)):
            raise BadInput(
                "the sampler of job.batches yields indices, and this one yields lists of them: "
                "give job.batches a DataLoader with it as batch_sampler, without batch_size"
            )
        raise BadInput(
            f"the sampler of job.batches yields indices of the dataset, from 0 to "
            f"{num_samples - 1}, and {bad!r} is none"
        )
    return torch.tensor([int(index) for index in indices], dtype=torch.int64)


def sampler_length(sampler: Any, otherwise: int | None) -> int | None:
    try:
        return len(sampler) if isinstance(sampler, Sized) else otherwise
    except TypeError:
        return otherwise


def _is_index(index: Any, num_samples: int) -> bool:
    try:
        return bool(0 <= int(index) == index < num_samples)
    except (TypeError, ValueError, RuntimeError):
        return False


@dataclass(frozen=True)
class SampleLists:
    """Global batches of a dataset without indices, as lists of samples."""

    data: Iterable[Any]
    batch_size: int
    drop_last: bool
    seed: int

    def __iter__(self) -> Iterator[list[Any]]:
        with restored_generators():
            seed_everything(self.seed)
            source = iter(self.data)
        number = 0
        while batch := self._next(source, number):
            if len(batch) < self.batch_size and self.drop_last:
                return
            number += 1
            yield batch

    def _next(self, source: Iterator[Any], number: int) -> list[Any]:
        with restored_generators():
            seed_everything(mix(self.seed, number))
            return list(islice(source, self.batch_size))


def collate_rows(samples: list[Any], split: BatchSplit, collate: Collate | None) -> AnyBatch:
    """This replica's rows of a list of samples, as a batch."""
    total = len(samples)
    rows = take(torch.arange(total), split.rows(total)).tolist()
    content = (collate or default_collate)([samples[i] for i in rows])
    return batch_of(content, total, split.sizes(total))
