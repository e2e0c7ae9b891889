"""Samplers of the script and datasets without indices: divided, and continued in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, TensorDataset
from torch.utils.data import WeightedRandomSampler as Weighted

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.train.job import Job
from tests.conftest import World
from tests.jobs import job_of
from tests.models import samples

NUMBERS = TensorDataset(torch.arange(20))
WEIGHTS = torch.arange(1.0, 26.0).tolist()


class Numbers(IterableDataset[Any]):
    """Samples that come one after the other, with noise."""

    def __init__(self, count: int = 25):
        x, y = samples(count).tensors
        self.pairs = list(zip(x, y, strict=True))

    def __iter__(self) -> Iterator[Any]:
        for x, y in self.pairs:
            yield x + torch.randn(()), y


def weighted(job: Job) -> Iterator[Any]:
    return job.batches(samples(25), 10, epochs=3, sampler=Weighted(WEIGHTS, 25))


def weighted_by_a_generator(job: Job) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(5)
    return job.batches(samples(25), 10, epochs=3, sampler=Weighted(WEIGHTS, 25, True, generator))


def stream(job: Job) -> Iterator[Any]:
    return job.batches(Numbers(), 10, epochs=3)


@pytest.mark.parametrize("batches", [weighted, weighted_by_a_generator, stream])
def test_replicas_divide_the_batches_of_one_device(
    world: World, batches: Callable[[Job], Iterator[Any]]
) -> None:
    def rows(group: Group | None = None) -> list[Any]:
        return [x for x, _ in batches(job_of(group))]

    alone = rows()
    parts = world(2, rows)
    assert len(alone) == 9
    for whole, first, second in zip(alone, *parts, strict=True):
        assert torch.equal(torch.cat([first, second]), whole)
    assert not torch.equal(alone[0], alone[3]), "every epoch draws for itself"


def test_a_sampler_chooses_the_samples() -> None:
    found = [x.tolist() for (x,) in job_of().batches(NUMBERS, 2, sampler=[3, 3, 7, 1, 0])]
    assert found == [[3, 3], [7, 1], [0]]


def test_a_stream_may_drop_its_last_batch_and_be_collated() -> None:
    job = job_of()
    found = list(job.batches(Numbers(25), 10, drop_last=True, collate=lambda s: {"n": len(s)}))
    assert found == [{"n": 10}, {"n": 10}]


def test_what_is_no_order_is_refused() -> None:
    data: Any
    distributed = DistributedSampler(NUMBERS, num_replicas=2, rank=0)
    for data, options, sentence in [
        (NUMBERS, {"batch_size": 4, "sampler": distributed}, "as for one device"),
        (NUMBERS, {"batch_size": 4, "sampler": [[1, 2]]}, "lists of them: .* batch_sampler"),
        (NUMBERS, {"batch_size": 4, "sampler": [20]}, "20 is none"),
        ([], {"sampler": [1]}, "map-style"),
        (Numbers(), {"batch_size": 4, "sampler": [1]}, "map-style"),
        (Numbers(), {"batch_size": 4, "loaders": 2}, "loaders cannot share out Numbers"),
        (NUMBERS, {"batch_size": 4, "sampler": iter([1]), "epochs": 2}, "pass a list"),
    ]:
        with pytest.raises(BadInput, match=sentence):
            next(job_of().batches(data, **options))
