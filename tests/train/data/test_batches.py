"""job.batches: the same samples on any number of workers, and where a run goes on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset
from torch.utils.data import WeightedRandomSampler as Weighted

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.strategy.strategy import parse
from shoal.train.data.batch_checks import batch_digest
from shoal.train.job import Job
from tests.conftest import World
from tests.jobs import SGD, Shown, job_of
from tests.models import mlp, samples

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


def shuffled(x: torch.Tensor, seed: int) -> torch.Tensor:
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))]


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: samples(10, seed=rank).tensors[0],
        lambda rank: shuffled(torch.arange(8.0).view(8, 1), rank),
        lambda rank: torch.zeros(8 + rank, 1),
    ],
    ids=["samples", "order", "size"],
)
def test_an_iterable_that_differs_between_ranks_is_refused(world: World, make: Any) -> None:
    """Replicas would take the same sample twice and leave others out."""

    def body(group: Group) -> None:
        x = make(group.rank)
        next(job_of(group).batches([(x, x)]))

    with pytest.raises(BadInput, match="different global batches from the same iterable"):
        world(2, body)


class Noisy(Dataset[Any]):
    """Samples with unseeded noise."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, random.SystemRandom().random()]), index % 3


DATASETS = {
    "the order differs": lambda rank: TensorDataset(shuffled(torch.arange(40.0).view(40, 1), rank)),
    "a sample differs": lambda rank: list(enumerate([*range(39), 39 + rank])),
    "a sample more": lambda rank: TensorDataset(torch.zeros(40 + rank, 1)),
    "all are equal": lambda rank: list(enumerate(range(40))),
    "each sample has noise": lambda rank: Noisy(),
}


@pytest.mark.parametrize("strategy", ["ddp", "pp(2)"])
@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_that_differs_between_ranks_is_refused(
    world: World, strategy: str, name: str
) -> None:
    """In its first batches, and now and then later."""

    def body(group: Group) -> int:
        job = Job(parse(strategy), group, device=torch.device("cpu"))
        return sum(1 for _ in job.batches(DATASETS[name](group.rank), 4, shuffle=False, epochs=2))

    if name in ("all are equal", "each sample has noise"):
        assert world(2, body) == [20, 20]
        return
    with pytest.raises(BadInput, match="have different datasets: the same indices give"):
        world(2, body)


def test_ranks_with_other_numbers_of_threads_compare_batches_exactly() -> None:
    batch = torch.randn(640, 1000, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    digests = set()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            digests.add(batch_digest(batch, 640))
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


@given(st.data())
def test_a_batch_with_other_bits_has_another_digest(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool]))
    rows = data.draw(st.integers(2, 50))
    columns = data.draw(st.integers(1, 40))
    drawn = torch.randint(0, 2, (rows, columns), generator=torch.Generator().manual_seed(rows))
    batch = drawn.to(dtype)
    order = data.draw(st.permutations(range(rows)))
    same = torch.equal(batch, batch[order])
    assert (batch_digest(batch, rows) == batch_digest(batch[order], rows)) == same
    assert batch_digest(batch, rows) == batch_digest(batch.t().contiguous().t(), rows)
    assert batch_digest(batch, rows) == batch_digest(torch.cat([batch, batch])[rows:], rows)


def test_missing_numbers_do_not_make_batches_differ(world: World) -> None:
    x = torch.full((4, 1), float("nan"))
    assert world(2, lambda g: len(list(job_of(g).batches([(x, x)])))) == [1, 1]


def test_a_batch_that_is_smaller_than_the_world_is_refused(world: World) -> None:
    with pytest.raises(BadInput, match="a batch of 2 samples cannot be shared by 3 replicas"):
        world(3, lambda g: job_of(g).batches(samples(10), 2))
    with pytest.raises(BadInput, match="a batch of 2 samples cannot be shared by 3 replicas"):
        world(3, lambda g: next(job_of(g).batches([samples(2).tensors])))
    with pytest.raises(BadInput, match="cannot be shared"):
        job_of().batches(samples(10), 0)
    with pytest.raises(BadInput, match=r"batch_size of job\.batches counts from 1"):
        job_of().batches(samples(10), -1)


def test_what_is_no_data_or_no_order_is_refused() -> None:
    class Endless:
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    data: Any
    distributed = DistributedSampler(NUMBERS, num_replicas=2, rank=0)
    for data, options, sentence in [
        (Endless(), {"batch_size": 4}, "Endless is not one"),
        (iter([]), {"epochs": 2}, "cannot repeat a generator"),
        (samples(0), {"batch_size": 4}, "nothing to train on"),
        (samples(8), {"batch_size": 4, "epochs": 0}, "nothing to train on"),
        (samples(8), {"batch_size": 4, "epochs": -1}, "epochs .* counts from 1"),
        (DataLoader(NUMBERS, 64, drop_last=True), {}, "nothing to train on: .* less than a batch"),
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


def test_every_epoch_has_its_own_order_in_loops_of_ones_own_too() -> None:
    orders = [x.tolist() for (x,) in job_of().batches(NUMBERS, 20, epochs=3)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    job = job_of()
    assert [x.tolist() for _ in range(3) for (x,) in job.batches(NUMBERS, 20)] == orders
    still = [x.tolist() for (x,) in job_of().batches(NUMBERS, 20, epochs=2, shuffle=False)]
    assert still == [list(range(20))] * 2


def test_batches_end_after_a_number_of_steps() -> None:
    fetched: list[int] = []

    class Watched(TensorDataset):
        def __getitem__(self, i: int) -> Any:
            fetched.append(i)
            return super().__getitem__(i)

    for steps, expected in [(5, 5), (100, 12)]:  # there are 12 batches
        fetched.clear()
        shown = Shown()
        job = job_of(progress=shown)
        step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
        for batch in job.batches(Watched(*samples(25).tensors), 10, epochs=4, steps=steps):
            job.log(loss=step(batch))
        assert job.steps == expected
        assert {r["total"] for r in shown.records} == {expected}
        if steps == 5:
            assert len(fetched) == 25 + 20, "an epoch, and two batches of the next one"


def test_an_endless_iterable_ends_after_a_number_of_steps() -> None:
    job = job_of()
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    for batch in job.batches(itertools.repeat(samples(10).tensors), steps=3):
        step(batch)
    assert job.steps == 3


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


def test_a_dataset_of_which_drop_last_leaves_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="drop_last leaves out all of it"):
        job_of().batches(NUMBERS, 32, drop_last=True)
    assert len(list(job_of().batches(NUMBERS, 20, drop_last=True))) == 1
