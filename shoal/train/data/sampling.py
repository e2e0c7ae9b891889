"""Which samples each replica sees, and when.

The order of samples depends on the seed and the epoch only. A global batch is split into
micro-batches first, and each micro-batch over the replicas. So a micro-batch holds the same
samples at any number of replicas:

    rows of a batch      0 1 2 3 4 5 | 6 7 8 9 10 11       2 micro-batches
    replica 0 of 2       0 1 2       | 6 7 8
    replica 1 of 2             3 4 5 |         9 10 11

In exact mode each replica computes whole micro-batches, since their bits must not change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate

from shoal.errors import BadInput
from shoal.train.data import AnyBatch, Batch, batch_of
from shoal.train.data.rows import num_rows, take, take_rows
from shoal.train.data.sample_seeds import mix as mix
from shoal.train.data.sample_seeds import seeded

Given = TypeVar("Given")
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class BatchSplit:
    """Which rows of a global batch one replica computes."""

    replica: int = 0
    replicas: int = 1
    microbatches: int = 1  # of one replica; of the global batch when exact
    exact: bool = False

    def rows(self, total: int) -> list[range]:
        """The rows of each micro-batch of this replica; a range may be empty."""
        if self.exact:
            mine = _slice(range(self.microbatches), self.replica, self.replicas)
            return [_slice(range(total), m, self.microbatches) for m in mine]
        microbatches = (
            _slice(range(total), m, self.microbatches) for m in range(self.microbatches)
        )
        return [_slice(rows, self.replica, self.replicas) for rows in microbatches]

    def sizes(self, total: int) -> list[int]:
        """The number of samples in each micro-batch of this replica."""
        return [len(rows) for rows in self.rows(total)]


@dataclass(frozen=True)
class BatchOptions:
    """How the samples of a dataset become batches; `job.batches` documents the options."""

    batch_size: int | None = None  # of the global batch
    epochs: int = 1
    steps: int | None = None
    shuffle: bool = True
    drop_last: bool = False
    collate: Collate | None = None
    loaders: int = 0  # processes that fetch samples in the background
    sampler: Iterable[Any] | None = None
    loader_seed: int = 0
    sample_seed: int = 0  # what a dataset draws for a sample follows from it and from the sample

    def batches_in(self, num_samples: int) -> int:
        size = self.batch_size or 1
        return num_samples // size if self.drop_last else -(-num_samples // size)


class FullDatasetBatch(Batch):
    """A whole dataset as one batch. Its minibatches are loaded one at a time, when computed."""

    minibatches: DatasetBatches

    @classmethod
    def over(cls, minibatches: DatasetBatches) -> FullDatasetBatch:
        batch = cls()
        sizes = (split.sizes(len(rows)) for rows, split in minibatches.batches)
        batch.total = sum(len(rows) for rows, _ in minibatches.batches)
        batch.microbatch_sizes = tuple(itertools.chain(*sizes))
        batch.minibatches = minibatches
        return batch

    def __iter__(self) -> Iterator[Any]:
        raise BadInput(
            "under mapreduce a batch is the whole dataset, which is never in memory at once: pass "
            "it to step as it is and change samples in the dataset or in collate, or use "
            'mapreduce(batch="mini")'
        )

    def __getitem__(self, index: Any) -> Any:
        return iter(self)


def round_robin(batches: Iterable[Given], split: BatchSplit) -> Iterator[tuple[Given, BatchSplit]]:
    """This replica's batch of every round of batches, one per replica, with all of its rows.

    The last round may be short. Its batches are split over the replicas, so that all replicas
    have the same number of batches.

        batches          0 1 2 3 4 5 6       3 replicas
        replica 1 gets     1     4   a third of 6
    """
    source = iter(batches)
    all_rows = replace(split, replica=0, replicas=1)
    while batch_round := list(itertools.islice(source, split.replicas)):
        if len(batch_round) == split.replicas:
            yield batch_round[split.replica], all_rows
        else:
            yield from ((batch, split) for batch in batch_round)


def permutation(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The order of samples in an epoch; the same on every rank, at any number of ranks."""
    generator = torch.Generator().manual_seed(mix(seed, 1, epoch))
    return torch.randperm(num_samples, generator=generator)


class DatasetBatches:
    """One epoch over a map-style dataset, from batch number `start`.

    `order` holds the indices of samples. With `in_turns` each replica takes whole batches.
    """

    def __init__(
        self,
        dataset: Any,
        order: Tensor,
        split: BatchSplit,
        options: BatchOptions,
        start: int = 0,
        in_turns: bool = False,
    ):
        self.dataset = seeded(dataset, options.sample_seed)
        self.options = options
        self.replicas = split.replicas
        self._known_ranges: dict[tuple[int, int], list[range]] = {}
        size = options.batch_size or 1
        numbers = range(start, options.batches_in(len(order)))
        batches = torch.split(order[start * size :], size)[: len(numbers)]
        self.batches = (
            list(round_robin(batches, split)) if in_turns else [(b, split) for b in batches]
        )

    def __iter__(self) -> Iterator[AnyBatch]:
        for content, (rows, split) in zip(self._load(), self.batches, strict=True):
            total = rows.shape[0]
            batch = batch_of(content, total, [len(rows) for rows in self._ranges(total, split)])
            batch.concurrent = self.replicas // split.replicas
            yield batch

    def _ranges(self, total: int, split: BatchSplit) -> list[range]:
        """`split.rows`: nearly all batches are equally large."""
        key = total, split.replicas  # of the two splits that batches in turns have
        if key not in self._known_ranges:
            self._known_ranges[key] = split.rows(total)
        return self._known_ranges[key]

    def _load(self) -> Iterable[Any]:
        data = self.dataset
        chosen = (take(rows, self._ranges(rows.shape[0], split)) for rows, split in self.batches)
        if type(data) is TensorDataset and self.options.collate is None:
            return (tuple(t[i] for t in data.tensors) for i in chosen)
        collate = self.options.collate or collated
        if self.options.loaders:
            return DataLoader(
                data,
                batch_sampler=(i.tolist() for i in chosen),
                collate_fn=self.options.collate,
                num_workers=self.options.loaders,
                generator=torch.Generator().manual_seed(self.options.loader_seed),
            )
        if callable(getattr(data, "__getitems__", None)):
            return (collate(list(data.__getitems__(i.tolist()))) for i in chosen)
        return (collate([data[k] for k in i.tolist()]) for i in chosen)


def collated(samples: list[Any]) -> Any:
    """`default_collate`; tuples of tensors and integers take half of its time."""
    first = samples[0]
    if type(first) is not tuple or any([len(sample) != len(first) for sample in samples]):
        return default_collate(samples)
    return [_column(items) for items in zip(*samples, strict=True)]


def _column(items: Any) -> Any:
    kinds = {*map(type, items)}
    if kinds == {int}:
        return torch.from_numpy(np.array(items, dtype=np.int64))
    if kinds == {Tensor} and items[0].layout is torch.strided and not items[0].is_nested:
        return torch.stack(items)
    return default_collate(items)


def split_batch(batch: Any, split: BatchSplit) -> AnyBatch:
    """This replica's rows of a global batch that the script made."""
    total = num_rows(batch)
    ranges = split.rows(total)
    return batch_of(take_rows(batch, ranges, total), total, [len(rows) for rows in ranges])


def _slice(rows: range, index: int, count: int) -> range:
    n = len(rows)
    return rows[index * n // count : (index + 1) * n // count]
