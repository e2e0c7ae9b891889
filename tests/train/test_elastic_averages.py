"""Workers that leave and join under localsgd and gossip, whose replicas update before they agree.

Samples are one-hot, and the loss is linear: with a learning rate of the batch size, each training
of sample i takes 1 from weight i. So the weights tell how often each sample has counted.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from shoal.comm.members.board import GroupMember
from shoal.errors import BadInput
from shoal.train.checkpoints import files
from shoal.train.job import Job
from tests.elastic import BATCH, EPOCHS, PER_EPOCH, Killed, Return, Workers, random_deaths

SAMPLES = BATCH * PER_EPOCH
LOCALSGD = "localsgd(every=4, elastic=True)"
COMPLETE = 'gossip(graph="complete", elastic=True)'
RING = "gossip(elastic=True)"  # with 3 workers it averages as the complete graph does
ONE_PEER = 'gossip(graph="one-peer", elastic=True)'


def one_hot() -> TensorDataset:
    return TensorDataset(torch.eye(SAMPLES))


class Stream(IterableDataset[tuple[Tensor]]):
    """The same samples, one after the other."""

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return ((row,) for row in torch.eye(SAMPLES))


class Tally(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, rows: Tensor) -> Tensor:
        return (rows @ self.counts).mean()


def tally_step(job: Job) -> Any:
    return job.step(Tally(), optimizer=partial(torch.optim.SGD, lr=BATCH))


def train(
    workers: Workers,
    job: Job,
    evaluates: bool = False,
    changes: bool = False,
    at_step: Callable[[Job], None] = lambda job: None,
) -> Any:
    step = tally_step(job)
    for _ in range(EPOCHS):
        for batch in job.batches(one_hot(), BATCH):
            at_step(job)
            if evaluates and job.steps % 3 == 0:  # the batch was fetched before
                job.evaluate(lambda loss, targets: loss, one_hot())
            step((batch[0] * 1.0,) if changes else batch)
    job.save(workers.folder / "saved")
    return job.steps


def check(workers: Workers, model: int = 0) -> None:
    """By the weights of the checkpoint."""
    assert set(workers.results.values()) == {EPOCHS * PER_EPOCH}
    counts = -files.read(workers.folder / "saved").model[f"{model}:counts"]
    torch.testing.assert_close(counts, torch.full_like(counts, EPOCHS), rtol=1e-4, atol=1e-4)


def test_a_worker_that_is_lost_between_two_averages_is_noticed_in_the_next_step(
    tmp_path: Path,
) -> None:
    """The others wait in step 7 until it has exited, and have done 3 of 4 steps when it is."""
    steps_when_noticed = []

    def die(job: Job) -> None:
        if job.steps == 6 and job.rank == 1:
            raise Killed
        while job.steps == 6 and not workers.run_dir.has_exited(1):
            threading.Event().wait(0.001)
        if job.steps == 7 and job.rank == 0:
            steps_when_noticed.append(job.replicas)

    workers = Workers(tmp_path, 3, partial(train, at_step=die), LOCALSGD)
    workers.run()
    check(workers)
    assert steps_when_noticed == [2]


def train_on_global_batches(workers: Workers, job: Job) -> Any:
    """Each replica makes the global batches itself, and takes its rows."""
    step = tally_step(job)
    for batch in job.batches(Stream(), BATCH):
        step(batch)
    for batch in job.batches(DataLoader(one_hot(), batch_size=BATCH), epochs=EPOCHS - 1):
        step(batch)
    job.save(workers.folder / "saved")
    return job.steps


def train_two_models(workers: Workers, job: Job) -> Any:
    steps = [tally_step(job), tally_step(job)]
    for batch in job.batches(one_hot(), BATCH, epochs=EPOCHS):
        for step in steps:
            step(batch)
    job.save(workers.folder / "saved")
    return job.steps


DDP = "ddp(elastic=True)"
evaluating = partial(train, evaluates=True)  # the worker is lost after the others fetched rows
changing = partial(train, changes=True)  # the script gets the lost batch again
LOSSES: list[tuple[Any, str, int, int, str]] = [
    (train, LOCALSGD, 1, 6, "before"),
    (train, LOCALSGD, 0, 6, "after"),
    (train, COMPLETE, 2, 31, "before"),
    (train, RING, 1, 24, "after"),
    (train, RING, 0, 23, "before"),
    (evaluating, DDP, 1, 14, "before"),
    (evaluating, LOCALSGD, 1, 7, "before"),
    (changing, DDP, 1, 13, "before"),
    # the period that is undone has batches of both loops
    (train_on_global_batches, LOCALSGD, 1, 4, "after"),
    (train_on_global_batches, LOCALSGD, 2, 6, "after"),
    (train_on_global_batches, DDP, 0, 9, "after"),
    (train_two_models, DDP, 1, 9, "before"),
    (train_two_models, DDP, 1, 12, "after"),
    (train_two_models, LOCALSGD, 1, 5, "before"),
    (train_two_models, LOCALSGD, 1, 5, "after"),
]


@pytest.mark.product
@pytest.mark.parametrize(("script", "strategy", "rank", "call", "when"), LOSSES)
def test_each_sample_counts_once_when_a_worker_is_lost(
    tmp_path: Path, script: Any, strategy: str, rank: int, call: int, when: str
) -> None:
    size = 4 if script is changing else 3
    workers = Workers(tmp_path, size, script, strategy, dies={GroupMember(rank, 0): (call, when)})
    workers.run()
    assert sorted(workers.results) == [r for r in range(size) if r != rank]
    check(workers)
    if script is train_two_models:
        check(workers, model=1)


def test_other_batches_than_those_of_the_job_are_refused_where_several_steps_are_undone(
    tmp_path: Path,
) -> None:
    def train_on_others(workers: Workers, job: Job) -> None:
        step = tally_step(job)
        for (rows,) in job.batches(one_hot(), BATCH):
            step((rows * 1.0,))

    with pytest.raises(BadInput, match="has to get the batches of job"):
        Workers(tmp_path, 1, train_on_others, LOCALSGD).run()


@pytest.mark.parametrize("strategy", [LOCALSGD, RING, ONE_PEER])
def test_a_worker_that_comes_back_is_admitted_and_used(tmp_path: Path, strategy: str) -> None:
    returning = Return()
    used: list[int] = []

    def wait(job: Job) -> None:
        if returning.is_late(job):
            used.append(job.steps)
        returning.wait(job)

    dies = {GroupMember(1, 0): (3 if strategy == LOCALSGD else 12, "before")}
    workers = Workers(tmp_path, 3, partial(train, at_step=wait), strategy, dies=dies)
    workers.run(lambda: returning.come_back(workers))
    assert used == list(range(8 if strategy == LOCALSGD else 7, EPOCHS * PER_EPOCH))
    if strategy != ONE_PEER:  # its replicas differ, and the mean is that of the survivors
        check(workers)


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["ddp(elastic=True)", LOCALSGD, COMPLETE])
@pytest.mark.parametrize("seed", range(12))
def test_each_sample_counts_once_whatever_workers_are_lost(
    tmp_path: Path, strategy: str, seed: int
) -> None:
    choose = random.Random(seed)
    calls = 40 if strategy == LOCALSGD else 150 if strategy == COMPLETE else 60
    dies = random_deaths(choose, choose.randint(1, 3), calls)
    script = partial(train, evaluates=choose.random() < 0.7)
    workers = Workers(tmp_path, 4, script, strategy, dies=dies)
    workers.run()
    assert set(workers.results) >= set(range(4)) - {member.worker for member in dies}
    check(workers)
