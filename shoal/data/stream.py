"""The batches that a replica trains on, resumed where a saved run ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.group import Group, Op
from shoal.data.batch import AnyBatch
from shoal.data.position import LoopPosition, Positions
from shoal.data.samplers import (
    SampleLists,
    check_sampler,
    collate_rows,
    draw_order,
    is_stream,
    sampler_length,
)
from shoal.data.sampling import (
    BatchSplit,
    Collate,
    DatasetBatches,
    FullDatasetBatch,
    Loading,
    mix,
    permutation,
    round_robin,
    split_batch,
)
from shoal.errors import BadInput
from shoal.pytree import tensors_of
from shoal.strategy.base import Batches

DEFAULT_BATCH_SIZE = 256  # of job.evaluate, where job.batches was not given one before


@dataclass(frozen=True)
class BatchOptions:
    """The options of `job.batches`, which documents them."""

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


@dataclass(frozen=True)
class Source:
    """Where the batches of a loop come from.

    `epoch(loop, number, start)` are those of an epoch, without the first `start` ones.
    `pass_over(batches, epochs)` brings the data to where it was after that.
    """

    per_epoch: int | None
    epoch: Callable[[LoopPosition, int, int], Iterable[AnyBatch]]
    pass_over: Callable[[int, int], None]


class BatchStream:
    """Yields this replica's rows of every global batch, and counts the batches.

    `delivered` counts batches over the whole run, resumed runs included. `positions` says which of
    them each loop of the script has had; these are left out. `skip` stands for it in checkpoints
    of earlier versions: so many batches of the first loops were trained on.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        seed: int,
        steps_done: Callable[[], int],
        on_batch: Callable[[AnyBatch], None],
    ):
        self.group = group
        self.device = device
        self.seed = seed
        self.replica = group.rank
        self.replicas = group.size
        self.steps_done = steps_done
        self.on_batch = on_batch
        self.positions = Positions()
        self.delivered = 0
        self.skip = 0
        self.is_resumed_later = False  # a loop over batches was done before a checkpoint
        self._has_delivered = False
        self.total_steps: int | None = None
        self.batch_size = DEFAULT_BATCH_SIZE
        self.max_steps: int | None = None  # of the whole job, whatever the script asks for
        self.kind = Batches.SPLIT  # which samples a replica trains on in a step
        self.must_stop: Callable[[], bool] = lambda: False  # asked between two batches
        self.compares = True  # whether replicas check that they make the same global batches

    def batches(self, data: Any, split: BatchSplit, options: BatchOptions) -> Iterator[Any]:
        """See `Job.batches`. Unusable data is an error before the first batch."""
        if options.sampler is not None:
            self._check_order(data, options)
        if options.batch_size is None:
            self._check_iterable(data, options.epochs)
            source = self._iterable_source(data, split)
        elif is_stream(data):
            self._check_stream(data, options)
            self.batch_size = options.batch_size
            source = self._stream_source(data, split, options)
        else:
            self._check_dataset(data, options.batch_size, options.epochs)
            self.batch_size = options.batch_size
            source = self._dataset_source(data, split, options)
        loop = self.positions.add()
        if options.batch_size is None and _has_state(data):
            loop.data = data
        batches = self._epochs(loop, source, options.epochs, self._last_step(data, options))
        return self._loop(loop, batches)

    def restore(self, delivered: int, positions: Positions | None) -> None:
        """Go on after `delivered` batches; an old checkpoint knows no positions."""
        self.delivered = delivered
        self.positions = positions or Positions()
        self.skip = 0 if positions else delivered

    @property
    def _is_full_dataset(self) -> bool:
        return self.kind is Batches.WHOLE_DATASET

    @property
    def _is_in_turns(self) -> bool:
        return self.kind is Batches.IN_TURNS

    def _loop(self, loop: LoopPosition, batches: Iterator[Any]) -> Iterator[Any]:
        """Generators of loops that are left are closed: that is how `break` is seen."""
        self.positions.begin(loop)
        try:
            yield from batches
        finally:
            loop.is_left = True

    def _epochs(
        self, loop: LoopPosition, source: Source, epochs: int, last_step: int | None
    ) -> Iterator[Any]:
        self._expect(loop, source.per_epoch, epochs, last_step)
        if loop.is_over:
            self.is_resumed_later = True
            source.pass_over(loop.batches, epochs)
            return
        has_state = loop.data is not None and loop.state is not None
        if has_state:
            loop.data.load_state_dict(loop.state)
        else:
            source.pass_over(loop.batches - loop.in_epoch, loop.epochs - 1)
        for i in range(max(0, loop.epochs - 1), epochs):
            if self._is_enough(last_step):
                return
            is_resumed = i < loop.epochs
            number = loop.epoch if is_resumed else self.positions.begin_epoch(loop)
            start = loop.in_epoch if is_resumed else self.skip
            if is_resumed and has_state:
                start = 0  # the data itself goes on in place
            yield from self._deliver(source.epoch(loop, number, start), loop, last_step)

    def _is_enough(self, last_step: int | None) -> bool:
        return (last_step is not None and self.steps_done() >= last_step) or self.must_stop()

    def _batches_per_epoch(self, num_samples: int, options: BatchOptions) -> int:
        if self._is_full_dataset:
            return 1
        size = self.batch_size
        return num_samples // size if options.drop_last else -(-num_samples // size)

    def _last_step(self, data: Any, options: BatchOptions) -> int | None:
        """The step to stop after: the script's `steps` or `max_steps`, whichever is less.

        A step on the whole dataset counts as all the batches in it.
        """
        if self.max_steps is None:
            return options.steps
        limit = self.max_steps
        if self._is_full_dataset and options.batch_size and isinstance(data, Sized):
            limit = max(1, round(limit * options.batch_size / max(1, len(data))))
        return limit if options.steps is None else min(options.steps, limit)

    def _expect(
        self, loop: LoopPosition, per_epoch: int | None, epochs: int, last_step: int | None
    ) -> None:
        """Compute the number of steps, which progress shows."""
        self.total_steps = last_step
        seen = loop.batches + self.skip
        if per_epoch is not None:
            available = self.steps_done() + max(0, per_epoch * epochs - seen)
            self.total_steps = available if last_step is None else min(last_step, available)
        if seen and per_epoch is not None and seen >= per_epoch * epochs:
            self.is_resumed_later = True

    @property
    def has_nothing_left(self) -> bool:
        """Whether all batches that the script asked for were trained on before a checkpoint."""
        return self.is_resumed_later and not self._has_delivered

    def _deliver(
        self, batches: Iterable[AnyBatch], loop: LoopPosition, last_step: int | None
    ) -> Iterator[Any]:
        """Yield batches; none is fetched that would not be trained on."""
        source = iter(batches)
        while not self._is_enough(last_step):
            batch = next(source, None)
            if batch is None:
                return
            self._has_delivered = True
            self.delivered += batch.concurrent
            loop.advance(batch.concurrent)
            self.on_batch(batch)
            yield batch if batch.given is None else batch.given

    def _skipped(self, loop: LoopPosition, batches: int) -> None:
        """Batches were left out; positions of a checkpoint have counted them already."""
        if self.skip:
            self.skip -= batches
            loop.advance(batches)

    def _dataset_source(self, data: Any, split: BatchSplit, options: BatchOptions) -> Source:
        epoch = partial(self._dataset_epoch, data, split, options)
        if options.sampler is None:
            per_epoch = self._batches_per_epoch(len(data), options)
            return Source(per_epoch, epoch, lambda batches, epochs: None)
        length = sampler_length(options.sampler, None)
        known = None if length is None else self._batches_per_epoch(length, options)
        return Source(known, epoch, partial(self._draw_again, data, options))

    def _dataset_epoch(
        self,
        data: Any,
        split: BatchSplit,
        options: BatchOptions,
        loop: LoopPosition,
        epoch: int,
        start: int,
    ) -> Iterable[AnyBatch]:
        order = self._order(data, options, epoch)
        num_batches = self._batches_per_epoch(len(order), options)
        start = min(start, num_batches)
        self._skipped(loop, start)
        if start == num_batches:
            return []
        loading = options.loading(mix(self.seed, 6, epoch, self.replica), mix(self.seed, 7, epoch))
        batches = DatasetBatches(data, order, split, loading, start, self._is_in_turns)
        return [FullDatasetBatch.over(batches)] if self._is_full_dataset else batches

    def _order(self, data: Sized, options: BatchOptions, epoch: int) -> Tensor:
        count = len(data)
        if options.sampler is None:
            return permutation(count, self.seed, epoch) if options.shuffle else torch.arange(count)
        if callable(getattr(options.sampler, "set_epoch", None)):
            options.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        most = None
        if sampler_length(options.sampler, None) is None and options.steps is not None:
            most = options.steps * self.batch_size
        order = draw_order(options.sampler, most, count, mix(self.seed, 8, epoch))
        self._check_same_batch((order,), len(order))
        return order

    def _draw_again(self, data: Sized, options: BatchOptions, batches: int, epochs: int) -> None:
        """Draw the orders of epochs that were trained on: the sampler may have a generator."""
        for _ in range(epochs):
            if batches <= 0:
                return
            batches -= self._batches_per_epoch(len(self._order(data, options, 0)), options)

    def _stream_source(self, data: Any, split: BatchSplit, options: BatchOptions) -> Source:
        def lists(epoch: int) -> SampleLists:
            return SampleLists(data, self.batch_size, options.drop_last, mix(self.seed, 7, epoch))

        make = partial(collate_rows, collate=options.collate)

        def of_epoch(loop: LoopPosition, epoch: int, start: int) -> Iterator[AnyBatch]:
            return self._iterable_epoch(lists(epoch), split, loop, epoch, start, make)

        length = _length(data)
        per_epoch = None if length is None else self._batches_per_epoch(length, options)
        return Source(per_epoch, of_epoch, partial(_pass_over, lists(0)))

    def _iterable_source(self, data: Iterable[Any], split: BatchSplit) -> Source:
        epoch = partial(self._iterable_epoch, data, split)
        return Source(_length(data), epoch, partial(_pass_over, data))

    def _iterable_epoch(
        self,
        data: Iterable[Any],
        split: BatchSplit,
        loop: LoopPosition,
        epoch: int,
        start: int,
        make: Callable[[Any, BatchSplit], AnyBatch] = split_batch,
    ) -> Iterator[AnyBatch]:
        is_first = True
        unseen = self._unseen(data, loop, start)
        assigned = round_robin(unseen, split) if self._is_in_turns else ((b, split) for b in unseen)
        for global_batch, rows in assigned:
            batch = make(global_batch, rows)
            batch.concurrent = split.replicas // rows.replicas
            if is_first:
                self._check_same_batch(global_batch, batch.total)
            is_first = False
            yield batch

    def _unseen(self, data: Iterable[Any], loop: LoopPosition, start: int) -> Iterator[Any]:
        """The batches that were not trained on before the checkpoint."""
        for i, batch in enumerate(data):
            if i < start:
                self._skipped(loop, 1)
            else:
                yield batch

    def _check_iterable(self, data: Any, epochs: int) -> None:
        if self._is_full_dataset:
            raise BadInput(
                "mapreduce trains on the whole dataset in every step: give job.batches the "
                "dataset and a batch_size (what is computed at a time), or use "
                'mapreduce(batch="mini")'
            )
        if not isinstance(data, Iterable):
            raise BadInput(
                f"job.batches takes a dataset with batch_size, or an iterable of batches; "
                f"{type(data).__name__} is neither"
            )
        if epochs > 1 and isinstance(data, Iterator):
            raise BadInput(
                "job.batches cannot repeat a generator for several epochs: pass a DataLoader or "
                "a list, or epochs=1"
            )

    def _check_order(self, data: Any, options: BatchOptions) -> None:
        check_sampler(options.sampler)
        if options.batch_size is None or is_stream(data):
            raise BadInput(
                "the sampler of job.batches chooses samples of a map-style dataset (len and "
                "indexing), in batches of batch_size: give both, or leave out the sampler"
            )
        if options.epochs > 1 and isinstance(options.sampler, Iterator):
            raise BadInput("a generator cannot be the sampler of several epochs: pass a list")

    def _check_stream(self, data: Any, options: BatchOptions) -> None:
        self._check_iterable(data, options.epochs)
        if options.loaders:
            raise BadInput(
                f"loaders cannot share out {type(data).__name__}, which has no indices: give "
                "job.batches a DataLoader over it, without batch_size, or loaders=0"
            )
        if options.batch_size is not None and options.batch_size < self.replicas:
            raise BadInput(
                f"a batch of {options.batch_size} samples cannot be shared by {self.replicas} "
                "replicas: use a larger batch_size or fewer workers"
            )

    def _check_same_batch(self, batch: Any, total: int) -> None:
        """Replicas that each make the global batch have to make the same one."""
        if total < self.replicas:
            raise BadInput(
                f"a batch of {total} samples cannot be shared by {self.replicas} replicas: "
                "use a larger batch or fewer workers"
            )
        if self.replicas == 1 or not self.compares:
            return
        sums = [_fingerprint(t).to(self.device) for t in tensors_of(batch)]
        mine = torch.stack([*sums, torch.tensor(total, device=self.device).double()])
        low = mine.clone()
        high = mine.clone()
        self.group.all_reduce(low, Op.MIN).wait()
        self.group.all_reduce(high, Op.MAX).wait()
        if not torch.equal(low.nan_to_num(), high.nan_to_num()):
            raise BadInput(
                f"rank {self.replica} and another rank got different global batches from the same "
                "iterable: seed its shuffling, or give job.batches the dataset and a batch_size"
            )

    def _check_dataset(self, data: Any, batch_size: int, epochs: int) -> None:
        if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
            raise BadInput(
                f"batch_size needs a map-style dataset (len and indexing), and "
                f"{type(data).__name__} is not one; omit it for an iterable of batches"
            )
        if batch_size < self.replicas:
            raise BadInput(
                f"a batch of {batch_size} samples cannot be shared by {self.replicas} replicas: "
                "use a larger batch_size or fewer workers"
            )
        if len(data) == 0 or epochs < 1:
            raise BadInput("there is nothing to train on: the dataset is empty or epochs is 0")


def _has_state(data: Any) -> bool:
    return all(callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict"))


def _pass_over(data: Iterable[Any], batches: int, epochs: int) -> None:
    """Iterate over what was trained on, as before: loaders draw, generators end."""
    for _ in range(epochs):
        if batches <= 0:
            return
        for _ in data:
            batches -= 1
            if batches == 0:
                break


def _length(data: Iterable[Any]) -> int | None:
    """None if it has no length; a DataLoader over an IterableDataset raises instead."""
    try:
        return len(data) if isinstance(data, Sized) else None
    except TypeError:
        return None


def _fingerprint(tensor: Tensor) -> Tensor:
    """One number that depends on the values and on their order."""
    flat = tensor.detach().flatten().double()
    positions = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.float64)
    return torch.dot(flat, positions.sqrt())
