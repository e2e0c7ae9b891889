"""Workers that leave and join between two steps; under zero each holds shards of the state."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.comm.members.board import GroupMember
from shoal.errors import BadInput, ShoalError
from shoal.train.checkpoints import files
from shoal.train.job import Job
from shoal.train.progress import ProgressSender
from tests.elastic import (
    BATCH,
    EPOCHS,
    PER_EPOCH,
    HostWorkers,
    Killed,
    Return,
    Workers,
    alone,
    built,
    exact_step,
    numbered,
    random_deaths,
    wait_for_request,
)
from tests.models import convnet

DDP = "ddp(elastic=True)"
STAGES = [f"zero({stage}, elastic=True)" for stage in (1, 2, 3)]
SIZE = 4
Wanted = tuple[list[float], dict[str, Tensor]]


def images() -> TensorDataset:
    rows, targets = numbered().tensors
    return TensorDataset(rows.repeat(1, 3)[:, :16].view(-1, 1, 4, 4), targets)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).double().mean()


def train_and_save(
    workers: Workers, job: Job, returning: Return | None = None
) -> list[float] | None:
    """With BatchNorm. Losses, and accuracies in the loop and after each epoch; a worker that has
    come back has too few to compare."""
    data = images()
    step = exact_step(job, convnet)
    results = []
    for _ in range(EPOCHS):
        for batch in job.batches(data, BATCH):
            results.append(float(step(batch)))
            with workers.lock:
                workers.used.setdefault(job.steps, set()).add(job.rank)
            if job.steps % 4 == 0:
                results.append(round(job.evaluate(accuracy, data), 9))
            if returning is not None:
                returning.wait(job)
        results.append(round(job.evaluate(accuracy, data), 9))
    job.save(workers.folder / "saved")
    return None if Return.is_late(job) else results


def train(
    workers: Workers, job: Job, before: Callable[[Job], None] = lambda job: None
) -> list[float]:
    """`before` is called with each batch."""
    step = exact_step(job)
    losses = []
    for batch in job.batches(numbered(), BATCH, epochs=EPOCHS):
        before(job)
        losses.append(float(step(batch)))
    return losses


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    """The weights, and the state of the optimizer."""
    saved = files.read(folder / "saved")
    return {**saved.model, **{f"optimizer {name}": t for name, t in saved.optimizer.items()}}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    folder = tmp_path_factory.mktemp("alone")
    return alone(train_and_save, folder), saved_tensors(folder)


def assert_same_bits(workers: Workers, wanted: Wanted) -> None:
    assert all(losses in (None, wanted[0]) for losses in workers.results.values())
    found = saved_tensors(workers.folder)
    assert list(found) == list(wanted[1])
    assert all(torch.equal(found[name], wanted[1][name]) for name in found)


KILLS: list[dict[int, tuple[int, str]]] = [  # by rank: the call in which it dies
    {0: (1, "before")},  # before any step
    {3: (12, "before")},  # in a step
    {1: (17, "after")},
]
KINDS = {0: HostWorkers, 1: partial(HostWorkers, per_host=2)}  # by the first rank that is lost


@pytest.mark.product
@pytest.mark.parametrize(
    ("strategy", "kills"),
    [
        *((strategy, kills) for strategy in (DDP, *STAGES) for kills in KILLS),
        (DDP, {2: (63, "before"), 0: (30, "after")}),
    ],
)
def test_losses_change_no_bit(
    tmp_path: Path, wanted: Wanted, strategy: str, kills: dict[int, tuple[int, str]]
) -> None:
    dies = {GroupMember(rank, 0): at for rank, at in kills.items()}
    kind: Any = KINDS.get(next(iter(kills)), Workers)
    workers = kind(tmp_path, SIZE, train_and_save, strategy, dies=dies)
    workers.run()
    assert sorted(workers.results) == [r for r in range(SIZE) if r not in kills]
    assert_same_bits(workers, wanted)


@pytest.mark.whole
@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.parametrize("rank", range(SIZE))
def test_a_worker_is_lost_at_any_call_of_a_run(
    tmp_path: Path, wanted: Any, strategy: str, rank: int
) -> None:
    for call in range(80):
        folder = tmp_path / str(call)
        folder.mkdir()
        when = ("before", "after")[(call + rank) % 2]
        dies = {GroupMember(rank, 0): (call, when)}
        workers = Workers(folder, SIZE, train_and_save, strategy, dies=dies)
        workers.run()
        assert len(workers.results) >= SIZE - 1
        assert_same_bits(workers, wanted)


@pytest.mark.whole
@pytest.mark.parametrize("strategy", [DDP, *(s.replace(")", ", copies=2)") for s in STAGES)])
@pytest.mark.parametrize("seed", range(20))
def test_several_workers_are_lost_at_any_calls(
    tmp_path: Path, wanted: Wanted, strategy: str, seed: int
) -> None:
    """Under zero two of them: that many copies of each shard there are."""
    choose = random.Random(seed)
    dies = random_deaths(choose, choose.randint(1, 3) if strategy == DDP else 2, calls=60)
    kind = HostWorkers if seed % 2 else Workers
    workers = kind(tmp_path, SIZE, train_and_save, strategy, dies=dies)
    workers.run()
    assert set(workers.results) >= set(range(SIZE)) - {member.worker for member in dies}
    assert_same_bits(workers, wanted)


@pytest.mark.parametrize("strategy", STAGES)
def test_neighbours_that_are_lost_at_once_end_the_run(tmp_path: Path, strategy: str) -> None:
    """Both workers that hold a shard die in the first step."""
    both = threading.Barrier(2)

    def die(job: Job) -> None:
        if job.steps == 3 and job.rank in (1, 2):
            both.wait(30)
            raise Killed

    with pytest.raises(ShoalError, match="too many workers were lost at once"):
        Workers(tmp_path, SIZE, partial(train, before=die), strategy).run()


def lose_and_return(
    folder: Path, strategy: str, kind: Any = Workers, **options: dict[GroupMember, Any]
) -> Workers:
    """Worker 1 is lost and comes back."""
    returning = Return()
    script = partial(train_and_save, returning=returning)
    dies = {GroupMember(1, 0): (5, "before")}
    workers: Workers = kind(folder, SIZE, script, strategy, dies=dies, **options)
    workers.run(lambda: returning.come_back(workers))
    return workers


@pytest.mark.parametrize(
    ("strategy", "moves"), [(DDP, False), (DDP, True), *((stage, False) for stage in STAGES)]
)
def test_a_worker_that_comes_back_gets_the_state_and_is_used(
    tmp_path: Path, wanted: Wanted, strategy: str, moves: bool
) -> None:
    """It comes to the one host of all workers, or to another one than before."""
    there = partial(HostWorkers, moved={GroupMember(1, 1): "host 2"})
    workers = lose_and_return(tmp_path, strategy, there if moves else Workers)
    assert_same_bits(workers, wanted)
    assert workers.used[6] == {0, 2, 3}
    assert all(workers.used[step] == {0, 1, 2, 3} for step in range(8, EPOCHS * PER_EPOCH + 1))


@pytest.mark.parametrize("strategy", STAGES)
def test_without_exact_the_result_is_that_of_one_worker_up_to_rounding(
    tmp_path: Path, strategy: str
) -> None:
    """Buckets are reduced to owners, which send them to copies; the norm counts each shard once."""

    adam = partial(torch.optim.AdamW, lr=0.01)
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
    options: Any = {"optimizer": adam, "scheduler": schedule, "clip_norm": 0.1, "accumulate": 2}

    def train(workers: Workers, job: Job) -> list[float]:
        step = job.step(built(), F.cross_entropy, **options)
        losses = [float(step(batch)) for batch in job.batches(numbered(), BATCH, epochs=EPOCHS)]
        job.save(workers.folder / "saved")
        return losses

    (tmp_path / "alone").mkdir()
    (tmp_path / "run").mkdir()
    wanted = alone(train, tmp_path / "alone")
    dies = {GroupMember(2, 0): (40, "before")}
    workers = Workers(tmp_path / "run", SIZE, train, strategy, dies=dies)
    workers.run()
    assert sorted(workers.results) == [0, 1, 3]
    for losses in workers.results.values():
        assert losses == pytest.approx(wanted, abs=1e-5)
    found = saved_tensors(workers.folder)
    for name, tensor in saved_tensors(tmp_path / "alone").items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)


NEWCOMER, SENDER, OTHER = GroupMember(1, 1), GroupMember(0, 0), GroupMember(2, 0)
ADMITTING = 3  # the generation: 1 has all workers, 2 is without worker 1


@pytest.mark.parametrize("lost", [NEWCOMER, SENDER, OTHER])
@pytest.mark.parametrize(
    "strategy",
    [*(pytest.param(text, marks=pytest.mark.whole) for text in (DDP, *STAGES[:2])), STAGES[2]],
)
def test_a_loss_while_a_newcomer_gets_the_state_changes_no_bit(
    tmp_path: Path, wanted: Wanted, strategy: str, lost: GroupMember, whole_suite: bool
) -> None:
    for call in range(14) if whole_suite else (4,):
        for when in ("before", "after") if whole_suite else ("before",):
            folder = tmp_path / f"{call}-{when}"
            folder.mkdir()
            workers = lose_and_return(folder, strategy, dies_in={lost: (ADMITTING, call, when)})
            assert lost.worker not in workers.results or lost.worker == 1
            assert set(workers.results) >= {0, 2, 3} - {lost.worker}
            assert_same_bits(workers, wanted)


def test_a_newcomer_gets_the_averages_of_whole_steps(tmp_path: Path) -> None:
    """It asks to join when worker 2 is lost, which has updated and not sent its weights yet."""
    comes = threading.Event()

    def train(workers: Workers, job: Job) -> list[Tensor]:
        step = exact_step(job)
        ema = job.ema(step.model, 0.5)
        if job.rank == 2:
            spread = step.sync.sharded.spread

            def die_before() -> None:
                if step.update.steps == 7:
                    comes.set()
                    wait_for_request(job)
                    workers.die()
                spread()

            step.sync.sharded.spread = die_before
        for batch in job.batches(numbered(), BATCH, epochs=EPOCHS):
            step(batch)
            ema.update()
        return [average.clone() for average in ema.averages]

    def come_back() -> None:
        assert comes.wait(60)
        workers.live(1, 1)

    dies = {GroupMember(1, 0): (5, "before")}
    workers = Workers(tmp_path, 4, train, "zero(2, elastic=True)", dies=dies)
    workers.run(come_back)
    wanted = alone(train, tmp_path)
    assert sorted(workers.results) == [0, 1, 3]
    assert all(all(map(torch.equal, r, wanted)) for r in workers.results.values())


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


def test_a_silent_host_is_lost_when_the_launcher_says_so(tmp_path: Path) -> None:
    """Its connections stay open: only the board knows of it."""
    others = threading.Semaphore(0)  # that have ended

    def fall_silent(job: Job) -> None:
        if job.rank == 1 and job.steps == 4:
            workers.note_exit(GroupMember(1, 0))
            assert all(others.acquire(timeout=60) for _ in range(2))
            raise Killed

    def train_and_release(workers: Workers, job: Job) -> Any:
        losses = train(workers, job, fall_silent)
        others.release()
        return losses

    workers = HostWorkers(tmp_path, 3, train_and_release)
    workers.run()
    wanted = alone(train, tmp_path)
    assert all(losses == wanted for losses in workers.results.values())


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


@pytest.mark.parametrize("strategy", [DDP, STAGES[2]])
def test_workers_with_different_models(tmp_path: Path, strategy: str) -> None:
    def train(workers: Workers, job: Job) -> None:
        step = exact_step(job, partial(torch.nn.Linear, 5, 4 + job.rank))
        for batch in job.batches(numbered(), BATCH):
            step(batch)

    with pytest.raises(BadInput, match=r"rank 1 has built another .* weight \[5, 5\]"):
        Workers(tmp_path, 2, train, strategy).run()
