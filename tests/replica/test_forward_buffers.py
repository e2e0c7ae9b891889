"""Buffers that a forward changes, besides BatchNorm's: once a step, by the whole batch, or said."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from shoal.train.job import Job
from tests.conftest import World
from tests.models import samples
from tests.seeds import seeded
from tests.splitting import assert_equal, on_workers, run, update


class Centered(nn.Module):
    """Subtracts a running mean, as people write it: in place, or by a new tensor."""

    def __init__(self, width: int, in_place: bool = True):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            new = self.mean.lerp(x.detach().mean(0), 0.1)
            if self.in_place:
                self.mean.copy_(new)
            else:
                self.mean = new
        return x - self.mean


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
        return x * (1 + 0.1 * self.forwards)


@seeded(0)
def spectral(norm: Any) -> nn.Module:
    return nn.Sequential(norm(nn.Linear(6, 8)), nn.ReLU(), norm(nn.Linear(8, 3)))


@seeded(0)
def between(*inner: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), inner[0], nn.ReLU(), nn.Linear(8, 8), *inner[1:], nn.Linear(8, 3)
    )


MODELS = {
    "spectral_norm": lambda: spectral(nn.utils.spectral_norm),
    "parametrized": lambda: spectral(parametrizations.spectral_norm),
    "counting": lambda: between(Counting(), Counting()),
    "running mean": lambda: between(nn.Identity(), Centered(8)),
    "new tensor": lambda: between(Centered(8, in_place=False), Centered(8)),
}
SCHEDULES = ["pp(2)", "pp(2, recompute=True)", 'pp(2, schedule="gpipe")', "ddp + pp(2)"]


CELLS = [*itertools.product(MODELS, SCHEDULES[:2]), *[("parametrized", s) for s in SCHEDULES[2:]]]


@pytest.mark.parametrize("name, strategy", CELLS)
def test_stages_change_buffers_once_a_step(world: World, name: str, strategy: str) -> None:
    size = 4 if "ddp" in strategy else 2
    assert_equal(world, size, strategy, MODELS[name], samples(27), batch_size=8)


def steps(job: Job, step: Any) -> None:
    for batch in job.batches(samples(16), 8):
        step(batch)


def own_loop(job: Job, model: nn.Module) -> None:
    model, optimizer = job.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in job.batches(samples(16), 8):
        job.backward(nn.functional.cross_entropy(model(x), y))
        update(optimizer)


@pytest.mark.parametrize(
    "name, strategy, is_said",
    [
        *((n, "ddp", "mean" in n or "tensor" in n) for n in MODELS),
        *(("running mean", s, True) for s in ["zero(3)", 'ps(placement="rank0")']),
        ("running mean", "pp(2, microbatches=2)", True),
        ("running mean", "tp(2)", False),
    ],
)
def test_a_running_mean_is_named_at_the_first_step(
    world: World, capfd: Any, name: str, strategy: str, is_said: bool
) -> None:
    on_workers(world, strategy, MODELS[name], steps, size=2)
    assert capfd.readouterr().err.count("depends on how batches are cut") == is_said


def test_a_loop_of_the_scripts_own_is_told_as_well(world: World, capfd: Any) -> None:
    models = [MODELS["running mean"]() for _ in range(2)]
    world(2, lambda group: run(group, "ddp", models[group.rank], own_loop))
    assert capfd.readouterr().err.count("changes 4.mean") == 1
