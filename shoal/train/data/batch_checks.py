"""Data that `job.batches` cannot use is an error before the first batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from shoal.comm.group import Group
from shoal.comm.objects import all_equal
from shoal.errors import BadInput
from shoal.runtime.pytree import tensors_of
from shoal.train.data.sampling import BatchOptions


def is_stream(data: Any) -> bool:
    """Whether samples come one after the other: an IterableDataset of torch or Hugging Face."""
    return any(base.__name__ == "IterableDataset" for base in type(data).__mro__)


def check_data(data: Any, options: BatchOptions, replicas: int, is_full_dataset: bool) -> None:
    """`is_full_dataset`: a step is on all samples."""
    batch_size = options.batch_size
    epochs = options.epochs
    for name, value in (("batch_size", batch_size or 0), ("epochs", epochs)):
        if not hasattr(value, "__index__") or value < 0:
            raise BadInput(
                f"{name} of job.batches counts from 1, and is a whole number, not {value!r}"
            )
    is_dataset = batch_size is not None and not is_stream(data)
    if options.sampler is not None:
        _check_sampler(options.sampler, is_dataset, epochs)
    if is_dataset and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise BadInput(
            f"batch_size needs a map-style dataset (len and indexing), and "
            f"{type(data).__name__} is not one; omit it for an iterable of batches"
        )
    if not is_dataset and is_full_dataset:
        raise BadInput(
            "mapreduce trains on the whole dataset in every step: give job.batches the dataset and "
            'a batch_size (what is computed at a time), or use mapreduce(batch="mini")'
        )
    if epochs > 1 and isinstance(data, Iterator):
        raise BadInput(
            "job.batches cannot repeat a generator for several epochs: pass a DataLoader or "
            "a list, or epochs=1"
        )
    if is_stream(data) and batch_size is not None and options.loaders:
        raise BadInput(
            f"loaders cannot share out {type(data).__name__}, which has no indices: give "
            "job.batches a DataLoader over it, without batch_size, or loaders=0"
        )
    if batch_size is not None:
        _check_enough(batch_size, replicas, "batch_size")


def _check_sampler(sampler: Any, is_dataset: bool, epochs: int) -> None:
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise BadInput(
            "the sampler of job.batches chooses samples as for one device, and a "
            "DistributedSampler those of one worker: leave it out, job.batches shuffles and divides"
        )
    if not is_dataset:
        raise BadInput(
            "the sampler of job.batches chooses samples of a map-style dataset (len and "
            "indexing), in batches of batch_size: give both, or leave out the sampler"
        )
    if epochs > 1 and isinstance(sampler, Iterator):
        raise BadInput("a generator cannot be the sampler of several epochs: pass a list")


def _check_enough(samples: int, replicas: int, what: str) -> None:
    if samples < replicas:
        raise BadInput(
            f"a batch of {samples} samples cannot be shared by {replicas} replicas: "
            f"use a larger {what} or fewer workers"
        )


@dataclass
class SameBatches:
    """Checks that ranks which each make the same batch, or have the same dataset, do so.

    `compares` is False where replicas do not wait for each other. `group` has all ranks: those of
    a replica that pp or tp splits read the data themselves, too.
    """

    group: Group
    replicas: int
    compares: bool = True

    @property
    def is_on(self) -> bool:
        return self.group.size > 1 and self.compares

    def check(self, batch: Any, total: int) -> None:
        """`total` is the number of samples in it."""
        _check_enough(total, self.replicas, "batch")
        if self.is_on and not all_equal(self.group, batch_digest(batch, total)):
            raise BadInput(
                f"rank {self.group.rank} and another rank got different global batches from the "
                "same iterable: seed its shuffling, or give job.batches the dataset and a "
                "batch_size"
            )

    def check_samples(self, fetch: Callable[[], Any], total: int) -> None:
        """`fetch` gets some samples of a dataset of `total`, the same ones on all ranks."""
        first = batch_digest(fetch(), total) if self.is_on else b""
        if not self.is_on or all_equal(self.group, first):
            return
        noise = b"" if first == batch_digest(fetch(), total) else b"%d" % self.group.rank
        if not all_equal(self.group, noise):
            self.compares = False  # samples with noise of their own are never twice the same
            return
        raise BadInput(
            f"rank {self.group.rank} and another rank have different datasets: the same indices "
            "give different samples. Sort what os.listdir or glob gives, and shuffle with a seed"
        )


def batch_digest(batch: Any, total: int) -> bytes:
    """Of a batch's bytes, in their order."""
    digest = hashlib.blake2b(str(total).encode(), digest_size=8)
    for tensor in tensors_of(batch):
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(content.numpy().data)
    return digest.digest()
