"""Optimizers from elsewhere in a loop of the user's own: their groups, methods and inner parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.conftest import World
from tests.jobs import job_of
from tests.models import mlp, samples
from tests.splitting import assert_script_equal, run


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

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("SAM takes two steps")


def decaying(job: Job, model: nn.Module, resets: bool = False) -> list[float]:
    """A frozen layer makes two parts, each with an optimizer of its own."""
    next(model.parameters()).requires_grad_(False)
    optimizer = Decaying(model.parameters())
    model, _ = job.setup(model, optimizer)
    losses = []
    for x, y in job.batches(samples(40), 10):
        losses.append(float(job.backward(F.cross_entropy(model(x), y))))
        optimizer.step()
        optimizer.zero_grad()
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
    plain = mlp()
    next(plain.parameters()).requires_grad_(False)
    expected = run_by_torch(plain)
    losses, _ = world(1, lambda g: run(g, "single", mlp(), decaying))[0]
    assert losses == pytest.approx(expected, abs=1e-5)


def run_by_torch(model: nn.Module) -> list[float]:
    optimizer = Decaying(model.parameters())
    losses = []
    for x, y in job_of().batches(samples(40), 10):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_methods_of_its_own_act_where_workers_have_all_parameters(world: World) -> None:
    def resetting(job: Job, model: nn.Module) -> list[float]:
        return decaying(job, model, resets=True)

    assert_script_equal(world, 2, "ddp", resetting)
    refused(world, "zero(2)", resetting, "Decaying.reset acts on all parameters")


def test_an_optimizer_inside_of_another_steps(world: World) -> None:
    assert_script_equal(world, 2, "ddp", sharpness_aware)
    for strategy in ("zero(2)", "tp(2)"):
        refused(world, strategy, sharpness_aware, r"^Sam\b.*take ddp")


def refused(
    world: World, strategy: str, script: Callable[[Job, nn.Module], Any], sentence: str
) -> None:
    models = [mlp(), mlp()]

    def body(group: Group) -> None:
        with pytest.raises(BadInput, match=sentence):
            run(group, strategy, models[group.rank], script)

    world(2, body)


class Wrapper(torch.optim.Optimizer):
    """Has another optimizer of the same parameters, as SAM does."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)

    def step(self, closure: Any = None) -> None:
        self.base.step()


@pytest.mark.parametrize("strategy", ["ddp", "zero(2)"])
def test_an_optimizer_that_the_job_does_not_know_is_refused(world: World, strategy: str) -> None:
    def body(group: Group) -> str:
        job = Job(parse(strategy), group, device=torch.device("cpu"))
        model = nn.Linear(4, 1)
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = job.setup(model, Wrapper(model.parameters()))
        try:
            job.backward(model(torch.ones(2, 4)).mean())
            optimizer.step()
            with pytest.raises(BadInput) as caught:
                other.step()
        finally:
            job.close()
        other.step()  # the job is over
        return str(caught.value)

    for sentence in world(2, body):
        assert "SGD" in sentence and "weight" in sentence and "job.setup" in sentence


def train_alone(job: Job, steps: int = 3, make: Any = None) -> None:
    """A loop without job.setup."""
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(job.batches(samples(32), 8)):
        if make is not None:
            optimizer = make(model)
        F.cross_entropy(model(x), y).backward()
        if i < steps:
            optimizer.step()


def in_a_job(script: Any, strategy: str = "ddp") -> Any:
    def body(group: Group) -> None:
        job = Job(parse(strategy), group, device=torch.device("cpu"))
        try:
            script(job)
        finally:
            job.close()

    return body


def test_a_model_that_the_job_does_not_know_is_not_trained_on_rows(world: World) -> None:
    with pytest.raises(BadInput, match="every worker would train a model of its own"):
        world(2, in_a_job(train_alone))
    world(1, in_a_job(train_alone))
    world(2, in_a_job(train_alone, "tp(2)"))  # all workers have the same rows


def test_what_may_step_on_rows(world: World) -> None:
    """Optimizers of one batch; scripts that do not train; those that exchange gradients."""

    def exchanging(job: Job) -> None:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in job.batches(samples(16), 8):
            F.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                job.group.all_reduce(p.grad).wait()
            optimizer.step()

    world(2, in_a_job(partial(train_alone, steps=0)))
    world(2, in_a_job(partial(train_alone, make=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))))
    world(2, in_a_job(exchanging))


def test_an_optimizer_is_given_to_setup_with_its_model() -> None:
    job = Job(parse("single"), solo_group(), device=torch.device("cpu"))
    model = job.setup(nn.Linear(6, 3))
    torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(BadInput, match=r"no optimizer, .* model, optimizer = job\.setup"):
        job.backward(model(torch.ones(2, 6)).mean())
    job.close()
