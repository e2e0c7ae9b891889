"""Local SGD and DiLoCo: steps alone, averages, outer steps, and what a checkpoint keeps of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.group import Group, Op
from shoal.errors import StrategyError
from shoal.strategy.strategy import parse
from shoal.sync.localsgd import LocalSgdSync
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests.conftest import World
from tests.jobs import CPU, after_training, model_of, weights_of
from tests.models import convnet, mlp, samples

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
PLAIN = partial(torch.optim.SGD, lr=0.1)


def start(
    group: Group, text: str, model: nn.Module, **options: Any
) -> tuple[Job, Step, LocalSgdSync]:
    job = Job(parse(text), group, device=CPU, seed=3)
    step = job.step(model, F.cross_entropy, **{"optimizer": SGD, **options})
    assert isinstance(step.sync, LocalSgdSync)
    return job, step, step.sync


after = partial(after_training, data=samples(64), batch_size=8, epochs=9, optimizer=SGD)


def mean(group: Group, tensor: Tensor) -> Tensor:
    found = tensor.clone()
    group.all_reduce(found, Op.MEAN).wait()
    return found


# ------------------------------------------------------------------------------ averages


@pytest.mark.parametrize("size", [2, 3])
def test_replicas_are_apart_between_averages_and_the_same_after(world: World, size: int) -> None:
    for steps in range(1, 7):
        found = after(world, size, "localsgd(every=3)", weights_of, steps=steps)
        assert all(torch.equal(data, found[0]) for data in found) == (steps % 3 == 0)


def test_the_average_is_that_of_replicas_that_trained_alone(world: World) -> None:
    """Three steps on the halves of batches, by hand; the gradient is that of a replica's mean."""
    x, y = samples(24).tensors
    batches = list(zip(x.split(8), y.split(8), strict=True))
    options: Any = {"data": batches, "batch_size": None, "optimizer": SGD}
    model, _ = after_training(world, 2, "localsgd(every=3)", model_of, **options)
    wanted = []
    for rank in range(2):
        alone = mlp()
        optimizer = SGD(alone.parameters())
        for inputs, targets in batches:
            rows = slice(rank * 4, rank * 4 + 4)
            optimizer.zero_grad()
            F.cross_entropy(alone(inputs[rows]), targets[rows]).backward()
            optimizer.step()
        wanted.append([p.detach() for p in alone.parameters()])
    for p, a, b in zip(model.parameters(), *wanted, strict=True):
        torch.testing.assert_close(p.detach(), (a + b) / 2)


def test_loss_is_the_global_one_at_averages_and_the_own_one_between(world: World) -> None:
    first, second = after(world, 2, "localsgd(every=2)", steps=4)
    assert first[0] != second[0] and first[2] != second[2]
    assert first[1] == second[1] and first[3] == second[3]
    alone = after(world, 1, "single", steps=1)[0][0]
    assert (first[0] + second[0]) / 2 == pytest.approx(alone, abs=1e-6)


def test_every_16_sends_a_sixteenth(world: World) -> None:
    def look(job: Job, step: Step, losses: Any) -> dict[str, Any]:
        job.evaluate(F.cross_entropy, samples(8))  # no part of training
        return step.sync.report()

    one, sixteen = (
        after(world, 4, f"localsgd(every={every})", look, steps=33)[0] for every in (1, 16)
    )
    assert one["bytes_per_step"] == one["ddp_bytes_per_step"]
    assert sixteen["bytes_sent"] * 33 == one["bytes_sent"] * 2


def test_batchnorm_is_local_and_its_running_statistics_are_averaged(world: World) -> None:
    def look(job: Job, step: Any, losses: Any) -> bool:
        own = step.model[1].running_mean
        return torch.allclose(own, mean(job.group, own), atol=1e-8)

    options: Any = {"make": convnet, "data": samples(48, (1, 4, 4))}
    for steps in range(1, 5):
        found = after(world, 2, "localsgd(every=3)", look, steps=steps, **options)
        assert found == [steps == 3] * 2


# ------------------------------------------------------------------------------ the outer step


@pytest.mark.parametrize(
    ("settings", "momenta"),
    [
        ("momentum=0.5, warmup=0", [0.5, 0.5, 0.5]),
        ("momentum=0.9", [1 / 11, 2 / 12, 3 / 13]),
        ("momentum=0.5, warmup=2", [1 / 3, 2 / 4, 0.5]),
    ],
)
def test_nesterov_by_hand(world: World, settings: str, momenta: list[float]) -> None:
    """v = m·v + d;  w = w - 0.7·(d + m·v), with d = agreed - average, m by the round."""
    text = f'localsgd(every=2, outer="nesterov(lr=0.7, {settings})")'
    models = [mlp(), mlp()]

    def body(group: Group) -> None:
        job, step, sync = start(group, text, models[group.rank], optimizer=PLAIN)
        agreed = step.flat.data.clone()
        v = torch.zeros(step.flat.size)
        momentum = iter(momenta)
        apply = sync.update.apply
        own = agreed

        def spy() -> None:
            nonlocal own
            apply()
            own = step.flat.data.clone()

        sync.update.apply = spy  # type: ignore[method-assign]
        for batch in job.batches(samples(60), 10):
            step(batch)
            if sync.since == 0:
                d = agreed - mean(group, own)
                m = next(momentum)
                v = m * v + d
                agreed = agreed - 0.7 * (d + m * v)
                torch.testing.assert_close(step.flat.data, agreed, atol=1e-6, rtol=0)

    world(2, body)


@pytest.mark.parametrize(
    ("outer", "sentence"),
    [
        ("lamb", "there is no outer optimizer 'lamb'; there are sgd, nesterov, adam"),
        ("sgd(beta1=0.9)", "outer sgd has no 'beta1'; it has lr, momentum, warmup"),
        ("sgd(lr=0)", "lr of outer sgd has to be above 0"),
        ("nesterov(momentum=1)", "momentum of outer nesterov has to be from 0 to below 1"),
        ("nesterov(momentum=0)", "say sgd"),
        (f"nesterov(warmup={'9' * 400})", "warmup of outer nesterov has to be 0 or more rounds"),
    ],
)
def test_an_outer_optimizer_that_makes_no_sense_is_refused(outer: str, sentence: str) -> None:
    with pytest.raises(StrategyError, match=sentence):
        parse(f'localsgd(outer="{outer}")')


# ------------------------------------------------------------------------------ checkpoints


def test_between_averages_a_checkpoint_keeps_what_the_next_outer_step_needs(
    world: World, tmp_path: Path
) -> None:
    text = 'localsgd(every=4, outer="nesterov(lr=0.7)")'

    def save(job: Job, step: Any, losses: Any) -> tuple[Tensor, Tensor]:
        job.save(tmp_path)
        return step.sync.agreed.data.clone(), mean(job.group, step.flat.data)

    agreed, average = after(world, 2, text, save, steps=6)[0]
    more = [mlp(9) for _ in range(3)]

    def load(group: Group) -> None:
        job, step, sync = start(group, text, more[group.rank])
        job.load(tmp_path)
        assert torch.equal(sync.agreed.data, agreed) and sync.since == 2
        torch.testing.assert_close(step.flat.data, average)
        for i, batch in enumerate(job.batches(samples(64), 8, epochs=9, steps=8)):
            step(batch)
            assert (sync.since == 0) == (i == 1)

    world(3, load)
