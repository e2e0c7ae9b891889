"""`job.setup` with a model that it has had: another optimizer trains it, as on one device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.conftest import World
from tests.models import convnet, samples
from tests.seeds import seeded
from tests.train.test_own_loop import SYNCHRONOUS, assert_equal_to_single, run

STRATEGIES = [*SYNCHRONOUS, "tp(2)"]
SGD = partial(torch.optim.SGD, lr=0.1)
ADAM = partial(torch.optim.Adam, lr=0.02, eps=1e-3)


@seeded(0)
def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def identity() -> nn.Module:
    """Ranks are threads: they share the generator of random numbers."""
    layer = nn.Linear(3, 3)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def epoch(job: Job, model: nn.Module, *optimizers: Any) -> list[float]:
    losses = []
    for i, (x, y) in enumerate(job.batches(samples(15), 5, shuffle=False)):
        optimizer = optimizers[i % len(optimizers)]
        optimizer.zero_grad()
        losses.append(float(job.backward(F.cross_entropy(model(x), y))))
        optimizer.step()
    return losses


def one_after_the_other(job: Job, model: nn.Module) -> list[float]:
    losses = []
    for make in (SGD, ADAM, SGD):
        model, optimizer = job.setup(model, make(model.parameters()))
        losses += epoch(job, model, optimizer)
    return losses


def all_before_the_loop(job: Job, model: nn.Module) -> list[float]:
    first, second = SGD(model.parameters()), ADAM(model.parameters())
    job.setup(model, first)
    job.setup(model, second)
    return epoch(job, model, first) + epoch(job, model, second, first)


def in_one_call(job: Job, model: nn.Module) -> list[float]:
    model, first, second = job.setup(model, SGD(model.parameters()), ADAM(model.parameters()))
    return epoch(job, model, first, second)


def head_first(job: Job, model: Any) -> list[float]:
    """Then all layers, then the first one alone, which is given as a model."""
    model[0].requires_grad_(False)
    model, optimizer = job.setup(model, ADAM(model[2].parameters()))
    losses = epoch(job, model, optimizer)
    model[0].requires_grad_(True)
    model, optimizer = job.setup(model, ADAM(model.parameters()))
    losses += epoch(job, model, optimizer)
    _, body = job.setup(model[0], SGD(model[0].parameters()))
    return losses + epoch(job, model, body, optimizer)


@pytest.mark.parametrize("strategy", ["ddp", "zero(2)"])
def test_a_later_optimizer_trains(world: World, strategy: str) -> None:
    assert_equal_to_single(world, 2, strategy, one_after_the_other, two_layers)


@pytest.mark.parametrize("strategy", ["zero(3)", "tp(2)"])
def test_layers_are_unfrozen(world: World, strategy: str) -> None:
    assert_equal_to_single(world, 2, strategy, head_first, two_layers)


@pytest.mark.whole
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "script", [one_after_the_other, all_before_the_loop, in_one_call, head_first]
)
def test_later_optimizers_under_every_strategy(world: World, strategy: str, script: Any) -> None:
    assert_equal_to_single(world, 2, strategy, script, two_layers)


def test_the_single_result_is_that_of_torch() -> None:
    losses, _ = run(solo_group(), "single", two_layers(), one_after_the_other)
    model = two_layers()
    expected = []
    for make in (SGD, ADAM, SGD):
        optimizer = make(model.parameters())
        for k in range(3):
            x, y = samples(15)[5 * k : 5 * k + 5]
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            expected.append(loss.item())
    assert losses == pytest.approx(expected, abs=1e-6)


def closure(job: Job, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    return job.backward(F.cross_entropy(model(x), y))


def adam_then_lbfgs(job: Job, model: nn.Module) -> list[float]:
    model, adam = job.setup(model, ADAM(model.parameters()))
    losses = epoch(job, model, adam)
    model, lbfgs = job.setup(
        model, torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    )
    for x, y in job.batches(samples(16), 16):
        losses.append(float(lbfgs.step(partial(closure, job, model, lbfgs, x, y))))
    return losses


def test_adam_then_lbfgs(world: World) -> None:
    assert_equal_to_single(world, 2, "ddp", adam_then_lbfgs, two_layers)


def test_replicas_that_average_weights(world: World) -> None:
    """After each step, and of equal batches: with SGD that is the result of one device."""

    def script(job: Job, model: nn.Module) -> None:
        for lr in (0.1, 0.5):
            model, optimizer = job.setup(model, torch.optim.SGD(model.parameters(), lr=lr))
            for x, y in job.batches(samples(16), 4, shuffle=False):
                optimizer.zero_grad()
                job.backward(F.cross_entropy(model(x), y))
                optimizer.step()

    _, single = run(solo_group(), "single", two_layers(), script)
    models = [two_layers(), two_layers()]
    for _, state in world(2, lambda g: run(g, "localsgd(every=1)", models[g.rank], script)):
        torch.testing.assert_close(state, single, rtol=1e-4, atol=2e-5)


def test_batchnorm_is_shared_once(world: World) -> None:
    def script(job: Job, model: nn.Module) -> list[float]:
        losses = []
        for make in (SGD, ADAM):
            model, optimizer = job.setup(model, make(model.parameters()))
            for x, y in job.batches(samples(8, (1, 4, 4)), 4, shuffle=False):
                optimizer.zero_grad()
                losses.append(float(job.backward(F.cross_entropy(model(x), y))))
                optimizer.step()
        return losses

    assert_equal_to_single(world, 2, "ddp", script, convnet)


def test_the_same_objects_again(world: World) -> None:
    def script(job: Job, model: nn.Module) -> list[float]:
        optimizer = SGD(model.parameters())
        losses = []
        for _ in range(2):
            model, optimizer = job.setup(model, optimizer)
            losses += epoch(job, model, optimizer)
        assert len(job._steps) == 1
        return losses

    assert_equal_to_single(world, 2, "zero(2)", script, two_layers)


def test_a_new_module_is_given_by_itself(world: World) -> None:
    def script(job: Job, model: Any) -> list[float]:
        model, optimizer = job.setup(model, SGD(model.parameters()))
        losses = epoch(job, model, optimizer)
        model.append(identity())
        with pytest.raises(BadInput, match=r"^3\.weight was added to Sequential, or replaced"):
            job.setup(model, SGD(model.parameters()))
        with pytest.raises(BadInput, match=r"^Sequential has 0\.0\.weight, which an earlier"):
            job.setup(nn.Sequential(model, nn.Linear(3, 3)))
        job.setup(model[3], SGD(model[3].parameters()))
        _, both = job.setup(model[3], SGD([*model[0].parameters(), *model[3].parameters()]))
        return losses + epoch(job, model, both)

    assert_equal_to_single(world, 2, "ddp", script, two_layers)


@pytest.mark.parametrize("strategy", ['ps(placement="rank0", mode="async")', "hogwild"])
def test_where_the_first_one_stays(world: World, strategy: str) -> None:
    def script(group: Group) -> None:
        run(group, strategy, two_layers(), all_before_the_loop)

    with pytest.raises(BadInput, match=r"keep the optimizer of their first job\.setup, and Adam"):
        world(2, script)


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["ddp", "zero(2)", "zero(3)", "tp(2)"])
def test_a_checkpoint_has_the_latest(world: World, tmp_path: Path, strategy: str) -> None:
    models = [two_layers(), two_layers(), two_layers()]
    path = tmp_path / "model"

    def train(job: Job, model: nn.Module) -> None:
        head_first(job, model)
        job.save(path)

    def save(group: Group) -> None:
        run(group, strategy, models[group.rank], train)

    def load(job: Job, model: Any) -> Any:
        model, _ = job.setup(model, ADAM(model[2].parameters()))
        model, optimizer = job.setup(model, ADAM(model.parameters()))
        job.setup(model[0], SGD(model[0].parameters()))
        job.load(path)
        return optimizer.state_dict()

    world(2, save)
    run(solo_group(), "single", models[2], load)


def test_it_says_that_a_state_is_not_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(parse("single"), solo_group(), device=torch.device("cpu"))
    all_before_the_loop(job, two_layers())
    job.save(tmp_path / "model")
    job.close()
    assert "that of SGD, which steps beside it, is not saved" in capsys.readouterr().err
