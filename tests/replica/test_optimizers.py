"""Optimizers that look at more than a worker has are refused where it has a part."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.replica.flat.optimizers import LooksAt, looks_at
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.conftest import World
from tests.models import mlp, samples
from tests.splitting import job_of


class Renamed(torch.optim.SGD):
    """Updates as SGD does."""


class Own(torch.optim.SGD):
    """Its update is not known."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Elementwise(Own):
    looks_at = "element"


class ByGlobalNorm(Own):
    looks_at = "model"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (torch.optim.Adam, LooksAt.ELEMENT),
        (Renamed, LooksAt.ELEMENT),
        (Elementwise, LooksAt.ELEMENT),
        (torch.optim.Adafactor, LooksAt.PARAMETER),
        (torch.optim.Muon, LooksAt.PARAMETER),
        (Own, None),
        (ByGlobalNorm, LooksAt.MODEL),
    ],
)
def test_a_class_is_known_or_says_what_it_looks_at(kind: Any, expected: LooksAt | None) -> None:
    assert looks_at(kind([nn.Parameter(torch.ones(4, 4))], lr=0.1)) is expected


def refused(world: World, strategy: str, kind: Any, sentence: str) -> None:
    models = [mlp(), mlp()]

    def body(group: Group) -> None:
        job = Job(parse(strategy), group, device=torch.device("cpu"), seed=3)
        try:
            with pytest.raises(BadInput, match=sentence):
                job.step(models[group.rank], F.cross_entropy, optimizer=partial(kind, lr=0.1))
        finally:
            job.close()

    world(2, body)


def test_no_strategy_gives_an_optimizer_less_than_it_looks_at(world: World) -> None:
    refused(world, "tp(2)", torch.optim.Adafactor, "Adafactor .*take ddp")
    refused(world, "tp(2)", Own, "Own.looks_at = ")
    refused(world, "zero(2)", ByGlobalNorm, "ByGlobalNorm .*take ddp")
    refused(world, "pp(2)", ByGlobalNorm, "ByGlobalNorm .*take ddp")


def test_an_optimizer_of_whole_parameters_trains_under_zero(world: World) -> None:
    models = [mlp(), mlp(), mlp()]

    def body(group: Group, strategy: str, model: nn.Module) -> float:
        job = Job(parse(strategy), group, device=torch.device("cpu"), seed=3)
        try:
            adafactor = partial(torch.optim.Adafactor, lr=0.1)
            step = job.step(model, F.cross_entropy, optimizer=adafactor)
            return [float(step(batch)) for batch in job.batches(samples(30), 10)][-1]
        finally:
            job.close()

    alone = world(1, lambda g: body(g, "ddp", models[2]))
    together = world(2, lambda g: body(g, "zero(2)", models[g.rank]))
    assert together == pytest.approx([alone[0]] * 2, abs=1e-5)


def test_one_that_is_not_known_is_named_where_workers_have_some_parameters(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(group: Group) -> None:
        with job_of(group, "zero(2)", mlp(), optimizer=partial(Own, lr=0.1)):
            pass

    world(2, body)
    assert capfd.readouterr().err.count('Own.looks_at = "model"') == 1
