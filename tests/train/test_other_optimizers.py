from __future__ import annotations

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
from tests.models import samples


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
