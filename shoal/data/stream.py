"""What a replica trains on, batch by batch, from where a saved run left off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.group import Group, Op
from shoal.data.sampling import (
    Batch,
    Cut,
    DatasetBatches,
    WholeBatch,
    in_turns,
    mix,
    part_of,
    permutation,
)
from shoal.errors import BadInput
from shoal.pytree import tensors_of


class Feed:
    """Delivers this replica's part of every global batch, and knows the place in the data.

    `delivered` counts batches over the whole life of a run; `skip` of them were seen before a
    checkpoint and are passed over. `steps_done` tells how far training is.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        seed: int,
        steps_done: Callable[[], int],
        on_batch: Callable[[Batch], None],
        say: Callable[[str], None],
    ):
        self.group = group
        self.device = device
        self.seed = seed
        self.replica = group.rank
        self.replicas = group.size
        self.steps_done = steps_done
        self.on_batch = on_batch
        self.say = say
        self.epochs = self.delivered = self.skip = 0
        self.total_steps: int | None = None
        self.batch_size = 256
        self.most_steps: int | None = None  # of the whole job, whatever the script asks for
        self.everything = False  # whether a step trains on the whole dataset
        self.turns = False  # whether replicas take whole batches in turns
        self.compares = True  # whether replicas check that they make the same global batches

    def batches(
        self,
        data: Any,
        batch_size: int | None,
        cut: Cut,
        *,
        epochs: int,
        steps: int | None,
        shuffle: bool,
        drop_last: bool,
        collate: Callable[[list[Any]], Any] | None,
        loaders: int,
    ) -> Iterator[Batch]:
        """See `Job.batches`. What is wrong with the data is told before the first batch."""
        steps = self._least(steps, data, batch_size)
        epoch_batches: Callable[[int], Iterable[Batch]]
        if batch_size is None and self.everything:
            raise BadInput(
                "mapreduce trains on the whole dataset in every step: give job.batches the "
                "dataset and a batch_size (what is computed at a time), or take "
                'mapreduce(batch="mini")'
            )
        if batch_size is None:
            self._check_iterable(data, epochs)
            per_epoch = _length(data)
            epoch_batches = partial(self._iterable_epoch, data, cut)
        else:
            self._check_dataset(data, batch_size, epochs)
            self.batch_size = batch_size
            per_epoch = len(data) // batch_size if drop_last else -(-len(data) // batch_size)
            if self.everything:
                per_epoch = 1
            load = partial(
                DatasetBatches, data, batch_size, cut,
                drop_last=drop_last, collate=collate, loaders=loaders, turns=self.turns,
            )  # fmt: skip
            epoch_batches = partial(self._dataset_epoch, load, len(data), per_epoch, shuffle)

        def generate() -> Iterator[Batch]:
            self._expect(per_epoch, epochs, steps)
            for _ in range(epochs):
                epoch = self.epochs
                self.epochs = self.epochs + 1
                yield from self._deliver(epoch_batches(epoch), steps)

        return generate()

    def _least(self, steps: int | None, data: Any, batch_size: int | None) -> int | None:
        """What the script asks for, or `most_steps`, if that is less.

        Where a step trains on the whole dataset it counts as the batches that are in it.
        """
        if self.most_steps is None:
            return steps
        most = self.most_steps
        if self.everything and batch_size and isinstance(data, Sized):
            most = max(1, round(most * batch_size / max(1, len(data))))
        return most if steps is None else min(steps, most)

    def _expect(self, per_epoch: int | None, epochs: int, steps: int | None) -> None:
        """Tell progress how many steps there will be."""
        self.total_steps = steps
        if per_epoch is not None:
            to_come = self.steps_done() + max(0, per_epoch * epochs - self.skip)
            self.total_steps = to_come if steps is None else min(steps, to_come)
        if self.skip and self.total_steps == self.steps_done():
            self.say(f"nothing is left to train: all {self.total_steps} steps were done before")

    def _deliver(self, batches: Iterable[Batch], steps: int | None) -> Iterator[Batch]:
        """Hand out batches; none is fetched that would not be trained on."""
        source = iter(batches)
        while steps is None or self.steps_done() < steps:
            batch = next(source, None)
            if batch is None:
                return
            self.delivered += batch.of
            self.on_batch(batch)
            yield batch

    def _dataset_epoch(
        self,
        load: Callable[..., DatasetBatches],
        num_samples: int,
        num_batches: int,
        shuffle: bool,
        epoch: int,
    ) -> Iterable[Batch]:
        start = min(self.skip, num_batches)
        self.skip -= start
        if start == num_batches:
            return []
        order = permutation(num_samples, self.seed, epoch) if shuffle else torch.arange(num_samples)
        batches = load(order, start, loader_seed=mix(self.seed, 6, epoch, self.replica))
        return [WholeBatch.of_pieces(batches)] if self.everything else batches

    def _iterable_epoch(self, data: Iterable[Any], cut: Cut, epoch: int) -> Iterator[Batch]:
        first = True
        left = self._left(data)
        for batch, own in in_turns(left, cut) if self.turns else ((b, cut) for b in left):
            part = part_of(batch, own)
            part.of = cut.replicas // own.replicas
            if first:
                self._check_same_batch(batch, part.total)
            first = False
            yield part

    def _left(self, data: Iterable[Any]) -> Iterator[Any]:
        """The batches that were not seen before."""
        for batch in data:
            if self.skip > 0:
                self.skip -= 1
            else:
                yield batch

    def _check_iterable(self, data: Any, epochs: int) -> None:
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

    def _check_same_batch(self, batch: Any, total: int) -> None:
        """Replicas that each make the global batch have to make the same one."""
        if total < self.replicas:
            raise BadInput(
                f"a batch of {total} samples cannot be shared by {self.replicas} replicas: "
                "take a larger batch or fewer workers"
            )
        if self.replicas == 1 or not self.compares:
            return
        sums = [_fingerprint(t).to(self.device) for t in tensors_of(tuple(batch))]
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
                f"batch_size goes with a map-style dataset (len and indexing), and "
                f"{type(data).__name__} is none; leave it out for an iterable of batches"
            )
        if batch_size < self.replicas:
            raise BadInput(
                f"a batch of {batch_size} samples cannot be shared by {self.replicas} replicas: "
                "take a larger batch_size or fewer workers"
            )
        if len(data) == 0 or epochs < 1:
            raise BadInput("there is nothing to train on: the dataset is empty or epochs is 0")


def _length(data: Iterable[Any]) -> int | None:
    """None where it has none, as a DataLoader over an IterableDataset, which raises instead."""
    try:
        return len(data) if isinstance(data, Sized) else None
    except TypeError:
        return None


def _fingerprint(tensor: Tensor) -> Tensor:
    """One number that tells the same values in another order apart."""
    flat = tensor.detach().flatten().double()
    places = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.float64)
    return torch.dot(flat, places.sqrt())
