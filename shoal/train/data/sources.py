"""Where the batches of a loop come from: a dataset, a stream of samples, an iterable of batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shoal.errors import BadInput
from shoal.strategy.base import Batches
from shoal.train.data import AnyBatch, batch_of
from shoal.train.data.batch_checks import SameBatches, is_stream
from shoal.train.data.position import LoopPosition
from shoal.train.data.rows import take
from shoal.train.data.sample_seeds import restored_generators, seed_everything
from shoal.train.data.sampling import (
    BatchOptions,
    BatchSplit,
    Collate,
    DatasetBatches,
    FullDatasetBatch,
    collated,
    mix,
    permutation,
    round_robin,
    split_batch,
)

_COMPARED = 8  # samples, now and then, with those of other ranks


def draw_order(sampler: Iterable[Any], most: int | None, num_samples: int, seed: int) -> Tensor:
    """The indices of one epoch; at most so many, where a sampler may have no end."""
    with restored_generators():
        seed_everything(seed)
        indices = list(islice(sampler, most))
    bad = next((index for index in indices if not _is_index(index, num_samples)), None)
    if isinstance(bad, (list, tuple)):
        raise BadInput(
            "the sampler of job.batches yields indices, and this one yields lists of them: "
            "give job.batches a DataLoader with it as batch_sampler, without batch_size"
        )
    if bad is not None:
        raise BadInput(
            f"the sampler of job.batches yields indices of the dataset, from 0 to "
            f"{num_samples - 1}, and {bad!r} is none"
        )
    return torch.tensor([int(index) for index in indices], dtype=torch.int64)


def _is_index(index: Any, num_samples: int) -> bool:
    try:
        return bool(0 <= int(index) == index < num_samples)
    except (TypeError, ValueError, RuntimeError):
        return False


def sample_lists(data: Iterable[Any], options: BatchOptions, seed: int) -> Iterator[list[Any]]:
    """Global batches of a dataset without indices, as lists of samples."""
    size = options.batch_size or 0
    with restored_generators():
        seed_everything(seed)
        source = iter(data)
    for number in itertools.count():
        with restored_generators():
            seed_everything(mix(seed, number))
            batch = list(islice(source, size))
        if not batch or (len(batch) < size and options.drop_last):
            return
        yield batch


def collate_rows(samples: list[Any], split: BatchSplit, collate: Collate | None) -> AnyBatch:
    """This replica's rows of a list of samples, as a batch."""
    total = len(samples)
    rows = take(torch.arange(total), split.rows(total)).tolist()
    content = (collate or collated)([samples[i] for i in rows])
    return batch_of(content, total, split.sizes(total))


Recall = Callable[[int, int], AnyBatch]  # a batch of before, split for this replica of so many


@dataclass(frozen=True)
class Feed:
    """What a source knows of the replica that gets its batches.

    `skipped(loop, batches)` is called with batches that were left out. `same` compares data with
    that of the other ranks.
    """

    split: BatchSplit
    seed: int
    kind: Batches
    skipped: Callable[[LoopPosition, int], None]
    same: SameBatches


class Source:
    """The global batches of a loop of the script, of which a replica gets its rows.

    `given` is the batch of the present epoch that was given out last.
    """

    given: AnyBatch | None = None
    repeats = False  # the next batch is the one that was given out last
    per_epoch: int | None = None  # batches; None where that is not known
    _at = 0  # the number of `given` in its epoch
    _rows: Iterator[AnyBatch]

    def __init__(self, feed: Feed, loop: LoopPosition):
        self.feed = feed
        self.loop = loop

    def begin(self, number: int, start: int) -> None:
        """An epoch begins, without its first `start` batches."""
        self.given = None
        self.repeats = False
        self._rows = iter(self._epoch(number, start))

    def next(self) -> AnyBatch | None:
        """The next batch, or None at the end of the epoch."""
        batch = next(self._rows, None)
        if batch is not None:
            self.given = batch
            self._at = self.loop.in_epoch - self.repeats
        self.repeats = False
        return batch

    def split_for(self, replica: int, replicas: int, repeats: bool) -> None:
        """Split the batches that come over other replicas; with `repeats`, the latest one again."""
        self.feed = replace(self.feed, split=self._split_of(replica, replicas))
        self._rows = self._again(self.loop.in_epoch - repeats, repeats)
        self.repeats = repeats

    def recall(self) -> Recall:
        """Makes the batch that was given out last again, also when the epoch is over."""
        raise NotImplementedError

    def pass_over(self, batches: int, epochs: int) -> None:
        """Bring the data to where it was after so many batches, in so many epochs."""

    def _epoch(self, number: int, start: int) -> Iterable[AnyBatch]:
        raise NotImplementedError

    def _again(self, at: int, repeats: bool) -> Iterator[AnyBatch]:
        """The rest of the epoch that is under way, from its batch `at` on.

        `repeats`: the batch at `at` was given out before; otherwise it was not fetched yet.
        """
        raise NotImplementedError

    def _split_of(self, replica: int, replicas: int) -> BatchSplit:
        return replace(self.feed.split, replica=replica, replicas=replicas)


def source_of(data: Any, options: BatchOptions, feed: Feed, loop: LoopPosition) -> Source:
    if options.batch_size is not None and not is_stream(data):
        return DatasetSource(data, options, feed, loop)
    length = _length(data)
    if options.batch_size is None:
        return GlobalBatchSource(feed, loop, length, lambda epoch: data, split_batch)
    return GlobalBatchSource(
        feed,
        loop,
        None if length is None else options.batches_in(length),
        lambda epoch: sample_lists(data, options, mix(feed.seed, 7, epoch)),
        partial(collate_rows, collate=options.collate),
    )


class DatasetSource(Source):
    """A map-style dataset, shuffled or in the order of a sampler."""

    def __init__(self, data: Any, options: BatchOptions, feed: Feed, loop: LoopPosition):
        super().__init__(feed, loop)
        self.data = data
        self.options = options
        length = _length(data if options.sampler is None else options.sampler)
        self.per_epoch = None if length is None else self._num_batches(length)
        self._number = 0
        self._present_order = torch.zeros(0, dtype=torch.int64)

    def _epoch(self, number: int, start: int) -> Iterable[AnyBatch]:
        self._number = number
        self._present_order = self._order(number)
        num_batches = self._num_batches(len(self._present_order))
        start = min(start, num_batches)
        self.feed.skipped(self.loop, start)
        if start == num_batches:
            return []
        batches = self._batches_from(start)
        is_whole = self.feed.kind is Batches.WHOLE_DATASET
        return [FullDatasetBatch.over(batches)] if is_whole else batches

    def _again(self, at: int, repeats: bool) -> Iterator[AnyBatch]:
        return iter(self._batches_from(at))

    def next(self) -> AnyBatch | None:
        at = self.loop.in_epoch
        loaders = min(self.options.loaders, 1)
        epoch = self._number
        is_compared = at == 0 and (epoch < 8 or epoch % 16 < 2)  # of two loops in turns, both
        is_compared |= epoch == 0 and at & (at - 1) == 0 and not loaders  # 1, 2, 4, 8 …
        batch = super().next()
        if batch is not None and is_compared and self.feed.same.is_on:
            start = at * (self.options.batch_size or 1)
            rows = self._present_order[start : start + _COMPARED]
            # where processes fetch samples, the files that they open are not opened here
            options = replace(self._seeded(), loaders=loaders, batch_size=_COMPARED)
            some = DatasetBatches(self.data, rows, BatchSplit(), options)
            self.feed.same.check_samples(lambda: next(iter(some)), len(self.data))
        return batch

    def recall(self) -> Recall:
        order = self._present_order
        at = self._at
        options = replace(self._seeded(), loaders=0)  # one batch is not worth a process

        def make(replica: int, replicas: int) -> AnyBatch:
            split = self._split_of(replica, replicas)
            return next(iter(DatasetBatches(self.data, order, split, options, at)))

        return make

    def _batches_from(self, start: int) -> DatasetBatches:
        """The rest of the present epoch."""
        order = self._present_order
        split = self.feed.split
        in_turns = self.feed.kind is Batches.IN_TURNS
        return DatasetBatches(self.data, order, split, self._seeded(), start, in_turns)

    def _seeded(self) -> BatchOptions:
        seed = self.feed.seed
        loader_seed = mix(seed, 6, self._number, self.feed.split.replica)
        sample_seed = mix(seed, 7, self._number)
        return replace(self.options, loader_seed=loader_seed, sample_seed=sample_seed)

    def pass_over(self, batches: int, epochs: int) -> None:
        """Draw the orders of epochs that were trained on: a sampler may have a generator."""
        for _ in range(epochs if self.options.sampler is not None else 0):
            if batches > 0:
                batches -= self._num_batches(len(self._order(0)))

    def _num_batches(self, num_samples: int) -> int:
        return (
            1 if self.feed.kind is Batches.WHOLE_DATASET else self.options.batches_in(num_samples)
        )

    def _order(self, epoch: int) -> Tensor:
        sampler = self.options.sampler
        seed = self.feed.seed
        count = len(self.data)
        if sampler is None:
            return permutation(count, seed, epoch) if self.options.shuffle else torch.arange(count)
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        most = None
        if self.options.steps is not None and _length(sampler) is None:  # it may have no end
            most = self.options.steps * (self.options.batch_size or 0)
        order = draw_order(sampler, most, count, mix(seed, 8, epoch))
        self.feed.same.check((order,), len(order))
        return order


class GlobalBatchSource(Source):
    """Each replica makes the global batches itself, such as a DataLoader's, and takes its rows."""

    _fetched: Iterator[AnyBatch]
    _latest: Any = None

    def __init__(
        self,
        feed: Feed,
        loop: LoopPosition,
        per_epoch: int | None,
        data: Callable[[int], Iterable[Any]],
        make: Callable[[Any, BatchSplit], AnyBatch],
    ):
        """`data` gives the global batches of an epoch, `make` a replica's rows of one of them."""
        super().__init__(feed, loop)
        self.per_epoch = per_epoch
        self._data = data
        self._make = make

    def _again(self, at: int, repeats: bool) -> Iterator[AnyBatch]:
        first = [self._make(self._latest, self.feed.split)] if repeats else []
        return itertools.chain(first, self._fetched)

    def recall(self) -> Recall:
        latest = self._latest
        return lambda replica, replicas: self._make(latest, self._split_of(replica, replicas))

    def pass_over(self, batches: int, epochs: int) -> None:
        """Iterate over what was trained on, as before: loaders draw, generators end."""
        for _ in range(epochs):
            if batches <= 0:
                return
            for _ in self._data(0):
                batches -= 1
                if batches == 0:
                    break

    def _epoch(self, number: int, start: int) -> Iterable[AnyBatch]:
        self._fetched = self._fetch(number, start)
        return self._fetched

    def _fetch(self, number: int, start: int) -> Iterator[AnyBatch]:
        """Rows of the batches that were not trained on before."""

        def unseen() -> Iterator[Any]:
            for i, batch in enumerate(self._data(number)):
                if i < start:
                    self.feed.skipped(self.loop, 1)
                else:
                    yield batch

        in_turns = self.feed.kind is Batches.IN_TURNS
        each = ((batch, self.feed.split) for batch in unseen())  # a split that may change
        is_first = True
        for batch, split in round_robin(unseen(), self.feed.split) if in_turns else each:
            self._latest = batch
            rows = self._make(batch, split)
            rows.concurrent = self.feed.split.replicas // split.replicas
            if is_first:
                self.feed.same.check(batch, rows.total)
            is_first = False
            yield rows


def _length(data: Any) -> int | None:
    """None if it has no length; a DataLoader over an IterableDataset raises instead."""
    try:
        return len(data) if isinstance(data, Sized) else None
    except TypeError:
        return None
