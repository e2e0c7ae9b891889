"""Workers that leave and join between two steps."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.members.board import GroupMember
from shoal.train.job import Job
from shoal.train.progress import ProgressSender
from tests.elastic import (
    BATCH,
    EPOCHS,
    PER_EPOCH,
    Return,
    Workers,
    alone,
    built,
    exact_step,
    numbered,
    weights,
)
from tests.elastic_hosts import HostWorkers
from tests.models import convnet
from tests.numbered import Killed

KILLS = [(0, 1, "before"), (2, 11, "before"), (3, 16, "after")]
ON_HOSTS = {0: HostWorkers, 2: Workers, 3: partial(HostWorkers, per_host=2)}  # by the lost rank


def train_plainly(workers: Workers, job: Job) -> Any:
    step = exact_step(job)
    losses = []
    for batch in job.batches(numbered(), BATCH, epochs=EPOCHS):
        losses.append(float(step(batch)))
    return losses, weights(step)


def same(found: Any, wanted: Any) -> bool:
    return found[0] == wanted[0] and all(map(torch.equal, found[1], wanted[1]))


@pytest.mark.parametrize(("rank", "call", "when"), KILLS)
def test_the_bits_are_those_of_an_undisturbed_run(
    tmp_path: Path, rank: int, call: int, when: str
) -> None:
    dies = {GroupMember(rank, 0): (call, when)}
    workers = ON_HOSTS[rank](tmp_path, 4, train_plainly, dies=dies)
    workers.run()
    wanted = alone(train_plainly, tmp_path)
    assert sorted(workers.results) == [r for r in range(4) if r != rank]
    assert all(same(result, wanted) for result in workers.results.values())


@pytest.mark.whole
@pytest.mark.parametrize("seed", range(20))
def test_workers_are_lost_at_any_call_of_a_run(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    ranks = choose.sample(range(4), choose.randint(1, 3))
    dies = {
        GroupMember(rank, 0): (choose.randrange(60), choose.choice(("before", "after")))
        for rank in ranks
    }
    kind: type[Workers] = HostWorkers if seed % 2 else Workers
    workers = kind(tmp_path, 4, train_with_evaluations, dies=dies)
    workers.run()
    wanted = alone(train_with_evaluations, tmp_path)
    assert set(workers.results) >= set(range(4)) - set(ranks)
    assert all(same(result, wanted) for result in workers.results.values())


def train_with_evaluations(workers: Workers, job: Job) -> Any:
    """With BatchNorm; an evaluation in the loop and after each epoch, a checkpoint at the end."""
    data = numbered()
    images = torch.utils.data.TensorDataset(
        data.tensors[0].repeat(1, 3)[:, :16].view(-1, 1, 4, 4), data.tensors[1]
    )
    step = exact_step(job, convnet)
    results = []
    for _ in range(EPOCHS):
        for batch in job.batches(images, BATCH):
            results.append(float(step(batch)))
            if job.steps % 4 == 0:
                results.append(round(job.evaluate(accuracy, images), 9))
        results.append(round(job.evaluate(accuracy, images), 9))
    job.save(workers.folder / f"saved-{workers.size}")
    return results, weights(step)


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).double().mean()


def test_evaluations_and_checkpoints_are_done_by_those_who_are_left(tmp_path: Path) -> None:
    dies = {GroupMember(0, 0): (30, "after"), GroupMember(2, 0): (63, "before")}
    workers = Workers(tmp_path, 3, train_with_evaluations, dies=dies)
    workers.run()
    wanted = alone(train_with_evaluations, tmp_path)
    assert list(workers.results) == [1]
    assert same(workers.results[1], wanted)


@pytest.mark.parametrize("changes", [False, True])
def test_samples_are_counted_as_they_are_split_in_the_step_that_ends(
    tmp_path: Path, changes: bool
) -> None:
    """`changes`: the script changes its rows, so it gets the interrupted batch again."""

    def train(workers: Workers, job: Job) -> tuple[int, int]:
        sgd = partial(torch.optim.SGD, lr=0.1)
        step = job.step(built(), torch.nn.functional.cross_entropy, optimizer=sgd)
        counted = 0
        for inputs, targets in job.batches(numbered(), BATCH, epochs=EPOCHS):
            before = job.steps
            step((inputs * 1.0 if changes else inputs, targets))
            counted += BATCH // job.replicas if job.steps > before else 0
        return job.report()["samples"], counted

    workers = Workers(tmp_path, 3, train, dies={GroupMember(1, 0): (13, "before")})
    workers.run()
    counts = list(workers.results.values())
    assert len(counts) == 2 and all(samples == counted for samples, counted in counts)
    most = BATCH * PER_EPOCH * EPOCHS // 2
    assert all(2 * most // 3 < counted < most for _, counted in counts), "lost at an end"


@pytest.mark.parametrize("comes_to", [None, "host 2"])
def test_a_worker_that_comes_back_is_used(tmp_path: Path, comes_to: str | None) -> None:
    """It comes to the one host of all workers, or to another one than before."""
    returning = Return()

    def train(workers: Workers, job: Job) -> Any:
        step = exact_step(job)
        results = []
        for _ in range(EPOCHS):
            for batch in job.batches(numbered(), BATCH):
                results.append(float(step(batch)))
                with workers.lock:
                    workers.used.setdefault(job.steps, set()).add(job.rank)
                returning.wait(job)
            results.append(job.evaluate(accuracy, numbered()))
        return [round(result, 9) for result in results], weights(step)

    dies = {GroupMember(1, 0): (5, "before")}
    workers = Workers(tmp_path, 3, train, dies=dies)
    if comes_to is not None:
        moved = {GroupMember(1, 1): comes_to}
        workers = HostWorkers(tmp_path, 3, train, dies=dies, moved=moved)
    workers.run(lambda: returning.come_back(workers))
    wanted = workers.results[0]
    assert same(workers.results[2], wanted)
    assert all(map(torch.equal, workers.results[1][1], wanted[1]))
    assert workers.used[6] == {0, 2}
    assert all(workers.used[step] == {0, 1, 2} for step in range(8, EPOCHS * PER_EPOCH + 1))


def test_a_silent_host_is_lost_when_the_launcher_says_so(tmp_path: Path) -> None:
    """Its connections stay open: only the board knows of it."""
    others = threading.Semaphore(0)  # that have ended

    def train(workers: Workers, job: Job) -> Any:
        step = exact_step(job)
        losses = []
        for batch in job.batches(numbered(), BATCH, epochs=EPOCHS):
            if job.rank == 1 and job.steps == 4:
                workers.note_exit(GroupMember(1, 0))
                assert all(others.acquire(timeout=60) for _ in range(2))
                raise Killed
            losses.append(float(step(batch)))
        others.release()
        return losses, weights(step)

    workers = HostWorkers(tmp_path, 3, train)
    workers.run()
    wanted = alone(train, tmp_path)
    assert same(workers.results[0], wanted) and same(workers.results[2], wanted)


def test_the_first_worker_that_is_left_shows_progress(tmp_path: Path) -> None:
    shown: list[tuple[int, int]] = []  # worker, step

    def train(workers: Workers, job: Job) -> None:
        progress = ProgressSender(lambda record: shown.append((job.rank, record["step"])))
        progress.due = lambda step, total: True  # type: ignore[method-assign]
        job._services = replace(job._services, progress=progress)
        step = exact_step(job)
        for batch in job.batches(numbered(), BATCH, epochs=EPOCHS):
            job.log(loss=step(batch))

    Workers(tmp_path, 3, train, dies={GroupMember(0, 0): (13, "before")}).run()
    steps = sorted(step for _, step in shown)
    assert steps == list(range(1, EPOCHS * PER_EPOCH + 1))
    assert {worker for worker, _ in shown} == {0, 1}
