"""Optimizers from elsewhere in a loop of the user's own: their groups, methods and inner parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.executors.solo import solo_group
from shoal.errors import BadInput
from shoal.train.job import Job
from tests.conftest import World
from tests.jobs import job_of
from tests.models import mlp, samples
from tests.splitting import assert_script_equal, assert_script_refused, run, update


class Decaying(torch.optim.SGD):
    """Counts its steps in the groups, as schedule-free optimizers do, and can be reset."""

    def __init__(self, params: Any, lr: float = 0.5, count: int = 0):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.setdefault("count", count)
        self.defaults["count"] = count

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["count"])

    def reset(self) -> None:
        for group in self.param_groups:
            group["count"] = 0


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization: up to the worst weights near by, and down from there."""

    def __init__(self, params: Any):
        super().__init__(params, {})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        for p in params:
            assert p.grad is not None
            self.state[p]["up"] = 0.05 * p.grad / norm
            p.add_(self.state[p]["up"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in [p for g in self.param_groups for p in g["params"] if p.grad is not None]:
            p.sub_(self.state[p]["up"])
        self.base_optimizer.step()
        self.zero_grad()


def decaying(job: Job, model: nn.Module, resets: bool = False) -> list[float]:
    """A frozen layer makes two parts, each with an optimizer of its own."""
    next(model.parameters()).requires_grad_(False)
    optimizer = Decaying(model.parameters())
    model, _ = job.setup(model, optimizer)
    losses = []
    for x, y in job.batches(samples(40), 10):
        losses.append(float(job.backward(F.cross_entropy(model(x), y))))
        update(optimizer)
        if resets:
            optimizer.reset()
    return losses


def sharpness_aware(job: Job, model: nn.Module) -> list[float]:
    model, optimizer = job.setup(model, Sam(model.parameters()))
    losses = []
    for x, y in job.batches(samples(40), 10):
        losses.append(float(job.backward(F.cross_entropy(model(x), y))))
        optimizer.first_step()
        job.backward(F.cross_entropy(model(x), y))
        optimizer.second_step()
    return [*losses, float(job.steps)]


def test_what_an_optimizer_counts_in_its_groups_is_kept(world: World) -> None:
    assert_script_equal(world, 2, "zero(2)", decaying)
    model = mlp()
    next(model.parameters()).requires_grad_(False)
    optimizer = Decaying(model.parameters())
    expected = []
    for x, y in job_of().batches(samples(40), 10):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        update(optimizer)
        expected.append(loss.item())
    assert run(solo_group(), "single", mlp(), decaying)[0] == pytest.approx(expected, abs=1e-5)


def test_methods_of_its_own_act_where_workers_have_all_parameters(world: World) -> None:
    resetting = partial(decaying, resets=True)
    assert_script_equal(world, 2, "ddp", resetting)
    sentence = "Decaying.reset acts on all parameters"
    assert_script_refused(world, "zero(2)", resetting, sentence)


def test_an_optimizer_inside_of_another_steps(world: World) -> None:
    assert_script_equal(world, 2, "ddp", sharpness_aware)
    for strategy in ("zero(2)", "tp(2)"):
        assert_script_refused(world, strategy, sharpness_aware, r"^Sam\b.*take ddp")


@pytest.mark.parametrize("strategy", ["ddp", "zero(2)"])
def test_an_optimizer_that_the_job_does_not_know_is_refused(world: World, strategy: str) -> None:
    def script(job: Job, model: nn.Module) -> torch.optim.Optimizer:
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = job.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        job.backward(model(torch.ones(2, 6)).mean())
        optimizer.step()
        with pytest.raises(BadInput, match=r"SGD.*weight.*job\.setup"):
            other.step()
        return other

    models = [mlp(), mlp()]
    for other, _ in world(2, lambda g: run(g, strategy, models[g.rank], script)):
        other.step()  # the job is over


def alone(job: Job, model: nn.Module, steps: int = 3, exchanges: bool = False) -> None:
    """A loop without job.setup."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(job.batches(samples(32), 8)):
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters() if exchanges else ():
            job.group.all_reduce(p.grad).wait()
        if i < steps:
            optimizer.step()


def optimizers_of_one_batch(job: Job, model: nn.Module) -> None:
    for x, y in job.batches(samples(32), 8):
        F.cross_entropy(model(x), y).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_model_that_the_job_does_not_know_is_not_trained_on_rows(world: World) -> None:
    models = [mlp(), mlp()]
    with pytest.raises(BadInput, match="every worker would train a model of its own"):
        world(2, lambda g: run(g, "ddp", models[g.rank], alone))
    run(solo_group(), "ddp", mlp(), alone)
    world(2, lambda g: run(g, "tp(2)", models[g.rank], alone))  # all workers have the same rows
    for script in (
        partial(alone, steps=0),
        partial(alone, exchanges=True),
        optimizers_of_one_batch,
    ):
        world(2, lambda g, script=script: run(g, "ddp", models[g.rank], script))


def test_an_optimizer_is_given_to_setup_with_its_model() -> None:
    def script(job: Job, model: nn.Module) -> None:
        model = job.setup(model)
        torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(BadInput, match=r"no optimizer, .* model, optimizer = job\.setup"):
            job.backward(model(torch.ones(2, 6)).mean())

    run(solo_group(), "single", mlp(), script)
