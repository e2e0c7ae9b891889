"""Which samples each replica sees, and when."""

from __future__ import annotations

import itertools
import random
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset, default_collate

from shoal.runtime.pytree import tensors_of
from shoal.train.data import Batch
from shoal.train.data.sample_seeds import SeededSamples, mix_each, seeded
from shoal.train.data.sampling import (
    BatchOptions,
    BatchSplit,
    DatasetBatches,
    collated,
    mix,
    permutation,
    round_robin,
    split_batch,
)
from tests.jobs import job_of
from tests.models import samples

quick = settings(deadline=None, max_examples=60)
totals = st.integers(0, 60)
replicas = st.integers(1, 8)
microbatches = st.integers(1, 8)


def splits(n: int, m: int, exact: bool = False) -> list[BatchSplit]:
    return [BatchSplit(r, n, m, exact) for r in range(n)]


@quick
@given(totals, replicas, microbatches)
def test_a_microbatch_holds_the_same_samples_at_any_number_of_replicas(
    total: int, n: int, m: int
) -> None:
    alone = BatchSplit(microbatches=m).rows(total)
    assert [row for rows in alone for row in rows] == list(range(total))
    parts = [split.rows(total) for split in splits(n, m)]
    for i in range(m):
        assert [row for part in parts for row in part[i]] == list(alone[i])
        sizes = [len(part[i]) for part in parts]
        assert max(sizes) - min(sizes) <= 1


@quick
@given(totals, replicas, microbatches)
def test_exact_gives_each_replica_whole_microbatches(total: int, n: int, each: int) -> None:
    alone = BatchSplit(microbatches=n * each, exact=True).rows(total)
    assert [row for rows in alone for row in rows] == list(range(total))
    assert [rows for split in splits(n, n * each, True) for rows in split.rows(total)] == alone
    assert all(len(split.rows(total)) == each for split in splits(n, n * each, True))


def test_a_permutation_depends_on_the_seed_and_the_epoch_alone() -> None:
    torch.manual_seed(1)
    first = permutation(100, 5, 2)
    torch.manual_seed(2)
    torch.rand(10)
    state = torch.get_rng_state()
    assert torch.equal(permutation(100, 5, 2), first)
    assert torch.equal(torch.get_rng_state(), state)
    others = [permutation(100, 5, 1), permutation(100, 2, 5), permutation(100, 6, 2)]
    assert not any(torch.equal(first, other) for other in others)


def test_mix_gives_other_seeds_for_other_numbers() -> None:
    grid = range(-2, 12)
    seeds = [mix(a, b, c) for a, b, c in itertools.product(grid, grid, grid)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert len({mix(1), mix(1, 0), mix(0, 1), mix(1, 0, 0), mix()}) == 5


def test_seeds_of_many_samples_are_those_of_each() -> None:
    indices = [0, 1, 77, 2**40]
    assert mix_each(mix(3), indices) == [mix(mix(3), index) for index in indices]


@pytest.mark.parametrize(
    "sample",
    [
        lambda i: (torch.tensor([1.0 * i]), i),
        lambda i: (i, 0.5 * i, i > 1, "a", {"k": i}),
        lambda i: (2.5 - i, {"k": (i,)}),
        lambda i: (i if i else 2.5,),
        lambda i: Pair(i, i),
        lambda i: [i, torch.ones(1)],
        lambda i: i,
    ],
)
def test_samples_are_collated_as_torch_does(sample: Callable[[int], Any]) -> None:
    samples = [sample(i) for i in range(3)]
    found, expected = collated(samples), default_collate(samples)
    assert str(found) == str(expected)
    assert [t.dtype for t in tensors_of(found)] == [t.dtype for t in tensors_of(expected)]


def test_mix_spreads_small_numbers_over_all_bits() -> None:
    seeds = [mix(i) for i in range(2000)]
    for bit in range(63):
        ones = sum(seed >> bit & 1 for seed in seeds)
        assert 850 < ones < 1150, f"bit {bit}"
    flips = [bin(mix(3, i) ^ mix(3, i + 1)).count("1") for i in range(500)]
    assert 29 < sum(flips) / len(flips) < 34, "one more changes half of the 63 bits"


class Plain:
    """A dataset with len and indexing, and nothing else."""

    def __init__(self, data: TensorDataset):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        return self.data[i]


class Fetching(Plain):
    """One that fetches many samples at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert all(isinstance(i, int) for i in indices)
        return [self.data[i] for i in indices]

    def __getitem__(self, i: int) -> Any:
        raise AssertionError("samples should be fetched together")


def epoch_of(
    data: Any, split: BatchSplit | None = None, start: int = 0, **loading: Any
) -> list[Batch]:
    order, options = permutation(len(data), 0, 0), BatchOptions(5, **loading)
    return list(DatasetBatches(data, order, split or BatchSplit(), options, start))


def same(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(
        (x.total, x.microbatch_sizes) == (y.total, y.microbatch_sizes)
        and all(map(torch.equal, tensors_of(x), tensors_of(y)))
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize(
    "split",
    [BatchSplit(), BatchSplit(1, 2, 2), BatchSplit(2, 3), BatchSplit(1, 2, 4, True)],
    ids=str,
)
def test_every_kind_of_dataset_gives_the_same_batches(split: BatchSplit) -> None:
    data = samples(13)
    wanted = epoch_of(data, split)
    for dataset in (Plain(data), Fetching(data), [data[i] for i in range(13)]):
        assert same(epoch_of(dataset, split), wanted)


@pytest.fixture
def feeders_end() -> Iterator[None]:
    """The thread that feeds a closed queue is about to end; that a process has ended is seen by
    the fixture `nothing_left_behind`."""
    yield
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(60)


@pytest.mark.usefixtures("feeders_end")
def test_a_loader_process_gives_the_same_batches_and_ends() -> None:
    data, split = samples(13), BatchSplit(1, 2)
    for dataset in (data, Plain(data)):
        assert same(epoch_of(dataset, split, loaders=1), epoch_of(data, split))
    loading = BatchOptions(5, loaders=1)
    left_early = iter(DatasetBatches(Plain(data), torch.arange(13), BatchSplit(), loading))
    next(left_early)
    del left_early


def test_all_samples_come_once_in_the_order_of_the_permutation() -> None:
    data = TensorDataset(torch.arange(13), torch.arange(13))
    batches = epoch_of(data)
    assert torch.equal(torch.cat([x for x, _ in batches]), permutation(13, 0, 0))
    assert [(b.total, b.microbatch_sizes) for b in batches] == [(5, (5,)), (5, (5,)), (3, (3,))]
    assert [b.total for b in epoch_of(data, drop_last=True)] == [5, 5]
    assert [b.total for b in epoch_of(samples(15), drop_last=True)] == [5, 5, 5]


def test_an_empty_part_holds_one_row_that_stands_in() -> None:
    data = TensorDataset(torch.arange(11), torch.arange(11))
    last = [epoch_of(data, split=BatchSplit(r, 3))[-1] for r in range(3)]
    assert [batch.microbatch_sizes for batch in last] == [(0,), (0,), (1,)]
    assert [len(batch[0]) for batch in last] == [1, 1, 1]


@pytest.mark.parametrize("start", [0, 1, 2, 3, 9])
def test_start_passes_over_batches_without_fetching_them(start: int) -> None:
    fetched: list[int] = []

    class Watched(Plain):
        def __getitem__(self, i: int) -> Any:
            fetched.append(i)
            return super().__getitem__(i)

    data = samples(13)
    assert same(epoch_of(Watched(data), start=start), epoch_of(data)[start:])
    assert len(fetched) == max(0, 13 - 5 * start)


@quick
@given(st.integers(1, 30), replicas, microbatches)
def test_an_iterable_and_a_dataset_are_cut_alike(total: int, n: int, m: int) -> None:
    data = TensorDataset(torch.arange(total), torch.arange(total))
    for split in splits(n, m):
        (from_dataset,) = DatasetBatches(data, torch.arange(total), split, BatchOptions(total))
        assert same([split_batch(data.tensors, split)], [from_dataset])


Pair = namedtuple("Pair", "left right")


def test_the_form_of_inputs_stays_and_numbers_stay_whole() -> None:
    x = torch.arange(4)
    inputs = {"a": x, "b": [x, (x, Pair(x, "text"))], "scale": torch.tensor(2.0), "n": 3}
    mine, targets = split_batch((inputs, x), BatchSplit(1, 2))
    assert mine["a"].tolist() == [2, 3] == targets.tolist()
    assert isinstance(mine["b"], list) and isinstance(mine["b"][1], tuple)
    assert isinstance(mine["b"][1][1], Pair) and mine["b"][1][1].right == "text"
    assert mine["b"][1][1].left.tolist() == [2, 3]
    assert mine["scale"].item() == 2.0 and mine["n"] == 3


@given(st.integers(0, 40), st.integers(1, 6))
def test_round_robin_takes_every_batch_once_and_gives_all_replicas_equally_many(
    num_batches: int, replicas: int
) -> None:
    dealt = [
        list(round_robin(range(num_batches), BatchSplit(r, replicas, microbatches=2)))
        for r in range(replicas)
    ]
    whole = num_batches // replicas
    left = num_batches % replicas
    assert {len(batches) for batches in dealt} == {whole + left}
    taken = [batch for batches in dealt for batch, split in batches if split.replicas == 1]
    assert sorted(taken) == list(range(whole * replicas))
    for r, batches in enumerate(dealt):
        expected = range(whole * replicas, num_batches)
        parts = [(batch, BatchSplit(r, replicas, microbatches=2)) for batch in expected]
        assert batches[whole:] == parts


numpy = pytest.importorskip("numpy")


class Drawing:
    """Draws from all three libraries for each sample."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> tuple[int, float, float, float]:
        return i, torch.rand(()).item(), random.random(), float(numpy.random.rand())


def drawn(replicas: int, loaders: int = 0, dataset: Any = None) -> dict[int, list[float]]:
    found = {}
    for replica in range(replicas):
        loading = BatchOptions(5, loaders=loaders, sample_seed=9)
        split = BatchSplit(replica, replicas)
        for batch in DatasetBatches(dataset or Drawing(), torch.arange(10), split, loading):
            for i, *numbers in zip(*(t.tolist() for t in batch), strict=True):
                found[i] = numbers
    return found


def test_augmentation_does_not_depend_on_the_number_of_workers() -> None:
    alone = drawn(1)
    assert alone == drawn(2) == drawn(3) == drawn(2, dataset=Subset(Drawing(), range(10)))
    assert len({numbers[0] for numbers in alone.values()}) == 10


@pytest.mark.whole
def test_augmentation_does_not_depend_on_loaders() -> None:
    assert drawn(1) == drawn(2, loaders=2)


def test_the_generators_outside_are_left_alone() -> None:
    def numbers(between: Callable[[], Any]) -> tuple[float, float, float]:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        between()
        return torch.rand(()).item(), random.random(), numpy.random.rand()

    assert numbers(lambda: drawn(2)) == numbers(lambda: None)


def test_every_epoch_draws_other_numbers_and_every_run_the_same() -> None:
    def epochs() -> list[dict[int, float]]:
        batches = job_of().batches(Drawing(), 10, epochs=2)
        return [dict(zip(b[0].tolist(), b[1].tolist(), strict=True)) for b in batches]

    first, second = epochs()
    assert first[3] != second[3]
    assert epochs() == [first, second]


class Sometimes(Drawing):
    """Only some samples draw, each from one library."""

    def __getitem__(self, i: int) -> tuple[int, float, float, float]:
        return (
            i,
            torch.rand(()).item() if i == 6 else 0.0,
            random.random() if i in (1, 9) else 0.0,
            float(numpy.random.rand()) if i == 8 else 0.0,
        )


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(10))])
def test_a_sample_that_draws_in_a_later_batch_draws_the_same(wrap: Callable[[Any], Any]) -> None:
    """Its generator is not seeded any more then, or was not at first: the batch comes again."""
    always = drawn(1)
    numbers = drawn(2, dataset=wrap(Sometimes()))
    assert numbers == drawn(1, dataset=wrap(Sometimes())) == drawn(5, dataset=wrap(Sometimes()))
    assert {i for i, row in numbers.items() if any(row)} == {1, 6, 8, 9}
    for i, row in numbers.items():
        assert all(value in (0.0, always[i][k]) for k, value in enumerate(row))


def test_generators_that_samples_leave_alone_are_not_seeded_after_the_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = SeededSamples(Plain(TensorDataset(torch.arange(8))), 1)
    samples.__getitems__([0, 1])
    calls: list[int] = []
    monkeypatch.setattr(random, "seed", calls.append)
    monkeypatch.setattr(numpy.random, "seed", calls.append)
    samples.__getitems__([2, 3])
    assert not calls


def test_datasets_that_draw_nothing_are_not_seeded() -> None:
    tensors = TensorDataset(torch.arange(4))
    assert seeded(tensors, 1) is tensors
    many = SeededSamples(Subset(tensors, range(4)), 1)
    assert [x.item() for (x,) in many.__getitems__([2, 3])] == [2, 3]
