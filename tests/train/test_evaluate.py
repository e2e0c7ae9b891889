"""job.evaluate: the metric of the whole dataset, on any number of workers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
)

import shoal
from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.comm.members.elastic_sum import ElasticSum
from shoal.comm.objects import encode
from shoal.errors import BadInput, ShoalError
from shoal.train.evaluate import SampleAssignment
from shoal.train.job import Job
from shoal.train.map_reduce import map_reduce_over
from tests.conftest import World
from tests.jobs import SGD, job_of
from tests.models import mlp, samples

DATA = samples(23)


def accuracy(out: Tensor, y: Tensor) -> Tensor:
    return (out.argmax(1) == y).float().mean()


def loss_and_accuracy(out: Tensor, y: Tensor) -> dict[str, Any]:
    return {"loss": F.cross_entropy(out, y), "accuracy": accuracy(out, y).item()}


@pytest.fixture
def job() -> Job:
    job = job_of()
    job.step(mlp(), F.cross_entropy, optimizer=SGD)
    return job


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [None, 1, 5, 100])
def test_evaluate_is_the_metric_of_the_whole_dataset(
    world: World, size: int, batch_size: int | None
) -> None:
    """23 samples: parts are uneven, and some are empty."""
    for found in evaluated(world, size, batch_size):
        assert found == pytest.approx(wanted(), abs=1e-6)


@pytest.mark.parametrize(("lost", "batch_size"), [((), 5), ((1,), 5), ((2, 1), 4), ((2,), 2)])
def test_evaluate_covers_all_samples_when_ranks_are_lost(
    world: World, tmp_path: Path, lost: tuple[int, ...], batch_size: int
) -> None:
    """A batch size of 2 leaves one of three ranks without a sample."""

    def sums(rank: int) -> ElasticSum:
        return ElasticSum(tmp_path / "sums", rank, lost.__contains__)

    found = [r for r in evaluated(world, 3, batch_size, sums, lost) if r is not None]
    assert len(found) == 3 - len(lost)
    assert all(result == found[0] for result in found)
    assert found[0] == pytest.approx(wanted(), abs=1e-6)


def evaluated(
    world: World,
    size: int,
    batch_size: int | None,
    sums: Callable[[int], ElasticSum | None] = lambda rank: None,
    lost: tuple[int, ...] = (),
) -> list[Any]:
    """What an evaluation gives on each rank, the second time as the first."""
    models = [mlp() for _ in range(size)]  # threads share the seed of torch

    def body(group: Group) -> Any:
        job = job_of(group, elastic_sum=sums(group.rank))
        job.step(models[group.rank], F.cross_entropy, optimizer=SGD)
        if group.rank in lost:
            return None
        first, second = (job.evaluate(loss_and_accuracy, DATA, batch_size) for _ in range(2))
        assert first == second
        return first

    return world(size, body)


def wanted() -> dict[str, float]:
    with torch.no_grad():
        numbers = loss_and_accuracy(mlp()(DATA.tensors[0]), DATA.tensors[1])
    return {name: float(number) for name, number in numbers.items()}


def test_evaluate_gives_a_number_for_a_number_and_needs_samples(job: Job) -> None:
    assert isinstance(job.evaluate(accuracy, samples(20)), float)
    assert job.evaluate(lambda out, y: 2, samples(20)) == 2.0
    with pytest.raises(BadInput, match="no samples"):
        job.evaluate(accuracy, [])
    with pytest.raises(BadInput, match="has to be one number"):
        job.evaluate(lambda outputs, targets: outputs.argmax(1) == targets, samples(10))
    with pytest.raises(ShoalError, match=r"job\.evaluate comes after job\.step"):
        job_of().evaluate(accuracy, samples(4))


def test_evaluate_switches_training_off_and_on_again(job: Job) -> None:
    seen = []
    model = nn.Sequential(nn.Dropout(0.9), mlp())
    job.step(model, F.cross_entropy, optimizer=SGD)

    def metric(out: Tensor, y: Tensor) -> float:
        seen.append((model.training, torch.is_grad_enabled()))
        return 0.0

    job.evaluate(metric, samples(4))
    assert seen == [(False, False)]
    assert model.training
    model[0].eval()  # it stays as it is
    with pytest.raises(ZeroDivisionError):
        job.evaluate(lambda out, y: 1 / 0, samples(4))
    assert model.training and not model[0].training


def test_evaluate_uses_the_latest_model_or_the_one_it_is_given(job: Job) -> None:
    first = job.step(nn.Linear(6, 1), F.mse_loss, optimizer=SGD)
    job.step(nn.Linear(6, 2), F.mse_loss, optimizer=SGD)
    assert job.evaluate(lambda out, y: out.shape[1], samples(4)) == 2.0
    assert job.evaluate(lambda out, y: out.shape[1], samples(4), step=first) == 1.0


def test_evaluate_does_not_disturb_the_place_in_the_data() -> None:
    def losses(evaluations: int) -> list[float]:
        job = job_of()
        step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
        found = []
        for batch in job.batches(samples(40), 10, epochs=2):
            found.append(step(batch).item())
            for _ in range(evaluations):
                job.evaluate(accuracy, samples(7))
        return found

    assert losses(1) == losses(0)


def test_evaluate_with_statistics_of_the_batch_equals_one_device(world: World) -> None:
    """BatchNorm without running statistics, after a training batch that left a rank empty."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(8, track_running_stats=False)
        return nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 3))

    def body(group: Group, model: nn.Module) -> float:
        job = job_of(group)
        step = job.step(model, F.cross_entropy, optimizer=SGD)
        for batch in job.batches(samples(12), 10):
            step(batch)
        found: float = job.evaluate(lambda out, y: F.cross_entropy(out, y), samples(12), 10)
        return found

    alone = body(solo_group(), make())
    models = [make() for _ in range(3)]
    for found in world(3, lambda g: body(g, models[g.rank])):
        assert found == pytest.approx(alone, abs=1e-5)


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 20), st.data())
def test_every_sample_is_evaluated_once_after_any_losses_in_any_round(
    samples: int, ranks: int, batch_size: int, data: st.DataObject
) -> None:
    numbers = torch.arange(samples)
    dataset = TensorDataset(numbers, numbers)
    now = SampleAssignment(dataset, numbers, tuple(range(ranks)), batch_size)
    done: list[int] = []
    while len(now.samples):
        missing = data.draw(st.sets(st.sampled_from(now.ranks), max_size=len(now.ranks) - 1))
        for rank in set(now.ranks) - missing:
            for batch in now.batches(rank):
                inputs: Any = batch[0]
                done += inputs.tolist()[: batch.microbatch_sizes[0]]
        now = now.without(missing)
    assert sorted(done) == list(range(samples))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_results_are_reduced_in_the_order_of_items(world: World, size: int) -> None:
    """With fewer items than workers, too; joining text is associative and not commutative."""
    for n in (1, 4, 11):
        found = world(size, lambda g, n=n: map_reduce_over(g, str, range(n), operator.add))
        assert found == ["".join(map(str, range(n)))] * size


def test_items_are_mapped_once_where_they_are(world: World) -> None:
    def body(group: Group) -> tuple[list[int], list[int]]:
        seen: list[int] = []
        return seen, job_of(group).map_reduce(
            lambda item: seen.append(item) or [item * item], iter(range(7)), operator.add
        )

    found = world(3, body)
    assert [seen for seen, _ in found] == [[0, 1], [2, 3], [4, 5, 6]]
    assert all(result == [0, 1, 4, 9, 16, 25, 36] for _, result in found)


def test_alone_map_reduce_needs_no_job_and_refuses_what_cannot_travel() -> None:
    assert shoal.map_reduce(lambda x: x * x, [1, 2, 3], operator.add) == 14
    with pytest.raises(BadInput, match="a set cannot be sent to another worker"):
        shoal.map_reduce(lambda x: {x}, [1, 2], operator.or_)
    for value in ({1 << 70: "a key"}, torch.eye(2).to_sparse()):
        with pytest.raises(BadInput, match="cannot be sent"):
            encode(value)


@pytest.mark.parametrize("size", [1, 2])
def test_evaluate_takes_a_loader(world: World, size: int) -> None:
    """The samples that it would take: all, or those of its sampler, in batches of its own size."""
    loaders = [
        DataLoader(DATA, batch_size=4, shuffle=True),
        DataLoader(DATA, batch_sampler=[[0, 1], [2]]),
        DataLoader(DATA, batch_size=20, drop_last=True),
    ]

    models = [mlp() for _ in range(size)]

    def work(group: Group) -> list[Any]:
        job = job_of(group=group)
        job.step(models[group.rank], F.cross_entropy, optimizer=SGD)
        return [job.evaluate(accuracy, loader, batch_size=5) for loader in loaders]

    job = job_of()
    job.step(mlp(), F.cross_entropy, optimizer=SGD)
    some = [job.evaluate(accuracy, Subset(DATA, range(n)), batch_size=5) for n in (23, 3, 20)]
    for found in world(size, work):
        assert found == pytest.approx(some, abs=1e-6)


def test_evaluate_refuses_what_has_no_indices(job: Job) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(DATA)

    for data in (DataLoader(Stream(), batch_size=4), DataLoader(DATA, batch_size=None), iter(DATA)):
        with pytest.raises(BadInput, match=r"a dataset with indices .* or a DataLoader"):
            job.evaluate(accuracy, data, batch_size=5)
    sampler = DistributedSampler(DATA, num_replicas=2, rank=0)
    with pytest.raises(BadInput, match="DistributedSampler takes those of one worker"):
        job.evaluate(accuracy, DataLoader(DATA, batch_size=4, sampler=sampler))
