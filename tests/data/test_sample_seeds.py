"""What a dataset draws follows from seed, epoch and sample."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from shoal.data.sample_seeds import SeededSamples, seeded
from shoal.data.sampling import BatchSplit, DatasetBatches, Loading
from tests.jobs import job_of

numpy = pytest.importorskip("numpy")


class Augmented:
    """Draws from all three libraries for each sample."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[int, float, float, float]:
        return i, torch.rand(()).item(), random.random(), float(numpy.random.rand())


def drawn(replicas: int, loaders: int = 0, dataset: Any = None) -> dict[int, list[float]]:
    found = {}
    for replica in range(replicas):
        loading = Loading(5, loaders=loaders, sample_seed=9)
        split = BatchSplit(replica, replicas)
        for batch in DatasetBatches(dataset or Augmented(), torch.arange(10), split, loading):
            for i, *numbers in zip(*(t.tolist() for t in batch), strict=True):
                found[i] = numbers
    return found


def test_augmentation_does_not_depend_on_the_number_of_workers() -> None:
    alone = drawn(1)
    assert alone == drawn(2) == drawn(3) == drawn(2, dataset=Subset(Augmented(), range(10)))
    assert len({numbers[0] for numbers in alone.values()}) == 10


@pytest.mark.whole
def test_augmentation_does_not_depend_on_loaders() -> None:
    assert drawn(1) == drawn(2, loaders=2)


def test_the_generators_outside_are_left_alone() -> None:
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    wanted = torch.rand(3).tolist(), random.random(), numpy.random.rand()
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    drawn(2)
    assert (torch.rand(3).tolist(), random.random(), numpy.random.rand()) == wanted


def test_every_epoch_draws_other_numbers_and_every_run_the_same() -> None:
    def epochs() -> list[dict[int, float]]:
        batches = job_of().batches(Augmented(), 10, epochs=2)
        return [dict(zip(b[0].tolist(), b[1].tolist(), strict=True)) for b in batches]

    first, second = epochs()
    assert first[3] != second[3]
    assert epochs() == [first, second]


def test_datasets_that_draw_nothing_are_not_seeded() -> None:
    tensors = TensorDataset(torch.arange(4))
    assert seeded(tensors, 1) is tensors
    many = SeededSamples(Subset(tensors, range(4)), 1)
    assert [x.item() for (x,) in many.__getitems__([2, 3])] == [2, 3]
