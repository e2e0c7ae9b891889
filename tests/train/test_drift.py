"""Ranks whose replicas train by rules of their own are refused; those that do not are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.launch.here.supervisor import replicas_differ
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.conftest import World
from tests.jobs import CPU, SGD
from tests.models import convnet, mlp, samples

Optimizers = Callable[[int, Any], torch.optim.Optimizer]


@contextmanager
def ending(job: Job) -> Iterator[None]:
    """Servers end with the block, however it ends."""
    try:
        yield
    finally:
        for step in job._steps:
            step.sync.close()


def looped(
    optimizer: Optimizers, follows: Callable[[Job, Tensor, Tensor], Any], strategy: str = "ddp"
) -> Callable[[Group], list[Any]]:
    """Two epochs over batches that a loader gives, with a scheduler that follows a loss."""
    models = [mlp() for _ in range(3)]

    def body(group: Group) -> list[Any]:
        job = Job(parse(strategy), group, device=CPU)
        with ending(job):
            return loop(job)

    def loop(job: Job) -> list[Any]:
        model = models[job.rank]
        model, made = job.setup(model, optimizer(job.rank, model.parameters()))
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(made, patience=0)
        x, y = samples(24).tensors
        for _ in range(2):
            for rows, targets in job.batches([(x[i : i + 6], y[i : i + 6]) for i in (0, 6, 12)]):
                loss = F.cross_entropy(model(rows), targets)
                scheduler.step(follows(job, loss.detach(), job.backward(loss)))
                made.step()
                made.zero_grad()
        job.evaluate(F.cross_entropy, samples(8), 4)
        return [made.param_groups[0]["lr"]]

    return body


def alike(rank: int, params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


OTHERS: dict[str, Optimizers] = {
    "class": lambda rank, p: (torch.optim.SGD if rank else torch.optim.Adam)(p, lr=0.1),
    "rate": lambda rank, p: torch.optim.SGD(p, lr=0.1 * (1 + rank)),
    "groups": lambda rank, p: torch.optim.SGD([{"params": [q]} for q in p] if rank else p, 0.1),
    "betas": lambda rank, p: torch.optim.Adam(p, betas=(0.9 - 0.1 * rank, 0.99)),
}
UNLIKE = {
    "class": "SGD, and rank 0 with Adam:",
    "rate": "lr 0.2 in group 0, and rank 0 with lr 0.1 in group 0:",
    "groups": r"1 parameters in group 0, and rank 0 with \d parameters in group 0:",
    "betas": r"betas \(0.8, 0.99\) in group 0, and rank 0 with betas \(0.9, 0.99\) in group 0:",
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_optimizer_on_a_rank_is_refused_at_set_up(world: World, what: str) -> None:
    with pytest.raises(BadInput, match=f"rank 1 trains with {UNLIKE[what]}"):
        world(2, looped(OTHERS[what], lambda job, own, mean: mean))


@pytest.mark.parametrize("strategy", ["ddp", "zero(3)", "tp(2)", "pp(2)", "ps"])
@pytest.mark.parametrize("what", OTHERS)
def test_another_optimizer_of_a_step_on_a_rank_is_refused(
    world: World, what: str, strategy: str
) -> None:
    models = [mlp(), mlp()]

    def body(group: Group) -> None:
        def factory(named: Any) -> torch.optim.Optimizer:
            return OTHERS[what](group.rank, [p for _, p in named])

        job = Job(parse(strategy), group, device=CPU)
        job.step(models[group.rank], F.cross_entropy, optimizer=factory)

    with pytest.raises(BadInput, match=f"rank 1 trains with {UNLIKE[what]}"):
        world(2, body)


DRIFT = r"rank 1 trains with lr [\d.e-]+ in step {0}, and rank 0 with lr [\d.e-]+ in step {0}: let "


@pytest.mark.parametrize("strategy", ["ddp", "zero(1)", "zero(2)", "zero(3)", "tp(2)", "ps"])
def test_a_scheduler_that_follows_a_workers_own_loss_is_refused(
    world: World, strategy: str
) -> None:
    def follows(job: Job, own: Tensor, mean: Tensor) -> int:
        return job.steps * (job.rank or -1)

    with pytest.raises(BadInput, match=DRIFT.format(2)):
        world(2, looped(alike, follows, strategy))


_LOCKSTEP = ["ddp", "zero(1)", "zero(2)", "zero(3)", "tp(2)", "pp(2)"]


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [*((strategy, 3) for strategy in _LOCKSTEP), *((one, 40) for one in [*_LOCKSTEP, "ps"])],
)
def test_a_learning_rate_that_follows_a_workers_own_loss_is_refused(
    world: World, strategy: str, steps: int
) -> None:
    """For one step alone: the end of a run compares it (without servers), or the sixteenth step."""
    models = [mlp(), mlp()]
    reached = [0, 0]

    def body(group: Group) -> None:
        job = Job(parse(strategy), group, device=CPU)

        def rate(step: int) -> float:
            return 0.1 if step != 2 else 0.1 - 0.05 * group.rank

        with ending(job):
            step = job.step(models[group.rank], F.cross_entropy, optimizer=SGD, lr=rate)
            for batch in job.batches(samples(12), 6, epochs=20, steps=steps):
                step(batch)
                reached[group.rank] = job.steps
            job.close()

    with pytest.raises(BadInput, match=DRIFT.format(3)):
        world(2, body)
    assert max(reached) == min(steps, 15)


@pytest.mark.parametrize("strategy", ["ddp", "zero(3)"])
def test_a_scheduler_that_follows_the_loss_of_the_batch_is_not(world: World, strategy: str) -> None:
    rates = world(3, looped(alike, lambda job, own, mean: mean, strategy))
    assert rates[0] == rates[1] == rates[2]


@pytest.mark.parametrize("call", ["evaluate", "save"])
def test_other_weights_on_a_rank_are_neither_evaluated_nor_saved(
    world: World, tmp_path: Path, call: str
) -> None:
    models = [mlp(), mlp()]

    def body(group: Group) -> None:
        job = Job(parse("zero(1)"), group, device=CPU)
        step = job.step(models[group.rank], F.cross_entropy, optimizer=SGD)
        for batch in job.batches(samples(12), 6):
            step(batch)
        if group.rank:
            step.flat.data[3] += 1e-3
        if call == "save":
            job.save(tmp_path / "model")
        job.evaluate(F.cross_entropy, samples(8), 4)

    with pytest.raises(BadInput, match=rf"ranks have different weights before job\.{call}"):
        world(2, body)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "strategy",
    ["ddp", 'ddp(algorithm="ring")', 'ddp(compress="int8")', 'ddp(compress="topk(0.1)")',
     'ddp(compress="powersgd(rank=2)")', "zero(1)", "zero(2)", "tp(2)", "pp(2)",
     "localsgd(every=2)", "ps", 'ps(update="worker")'],
)  # fmt: skip
def test_replicas_that_train_by_one_rule_have_the_same_bits(
    world: World, tmp_path: Path, strategy: str
) -> None:
    size = 4 if strategy in ("tp(2)", "pp(2)") else 3
    models = [convnet() if size == 3 else mlp() for _ in range(size)]

    def body(group: Group) -> Any:
        job = Job(parse(strategy), group, device=CPU)
        step = job.step(models[group.rank], F.cross_entropy, optimizer=SGD, batchnorm="local")
        data = samples(40) if size == 4 else images(36)
        with ending(job):
            for batch in job.batches(data, 12):
                step(batch)
            job.save(tmp_path / "model")
        return job.report()["weights"]

    digests = world(size, body)
    assert not replicas_differ(digests)
    assert all(digests) or strategy.startswith(("localsgd", "tp", "pp"))


def images(count: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 1, 4, 4, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randint(0, 3, (count,), generator=generator))


def test_workers_that_have_ended_with_other_weights_are_told_apart_by_their_reports() -> None:
    assert replicas_differ(["0 AVX2 1  [5]", "0 AVX2 1  [6]"])
    assert not replicas_differ(["0 AVX2 1  [5]", "0 AVX512 1  [6]", "1 AVX2 1  [7]", "", ""])
