"""Optimizers that look at more than a worker has are refused where it has a part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.strategy.strategy import parse
from shoal.sync.optimizer_trial import Coupling, Pieces, coupling
from shoal.train.job import Job
from tests.conftest import World
from tests.models import mlp, samples


class ByGlobalNorm(torch.optim.SGD):
    """Divides by the norm of all gradients, as LAMB and D-adaptation do."""

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grads_with_norm_(
            [p for group in self.param_groups for p in group["params"]],
            1.0,
            nn.utils.get_total_norm([g for g in grads if g is not None]),
        )
        return super().step(closure)


class Elementwise(torch.optim.SGD):
    """Not of torch, but it looks at each element alone."""


class Odd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None


def found(kind: Callable[..., torch.optim.Optimizer], pieces: Pieces) -> Coupling:
    return coupling(kind([WEIGHT, OTHER], lr=0.0), pieces)


WEIGHT = nn.Parameter(torch.ones(4, 4))
OTHER = nn.Parameter(torch.ones(2, 4))
SHARD = Pieces(has_all_parameters=False)
SLICE = Pieces(False, {WEIGHT: 1})


@pytest.mark.parametrize(
    ("kind", "in_a_shard", "in_a_slice"),
    [
        (torch.optim.Adam, Coupling.NONE, Coupling.NONE),
        (Elementwise, Coupling.NONE, Coupling.NONE),
        (torch.optim.Adafactor, Coupling.NONE, Coupling.ELEMENTS),
        (torch.optim.Muon, Coupling.NONE, Coupling.ELEMENTS),
        (ByGlobalNorm, Coupling.PARAMETERS, Coupling.PARAMETERS),
        (Odd, Coupling.UNKNOWN, Coupling.UNKNOWN),
    ],
)
def test_tiny_tensors_tell_what_an_optimizer_looks_at(
    kind: Callable[..., torch.optim.Optimizer], in_a_shard: Coupling, in_a_slice: Coupling
) -> None:
    before = torch.get_rng_state()
    assert found(kind, SHARD) is in_a_shard
    assert found(kind, SLICE) is in_a_slice
    assert found(kind, Pieces()) is Coupling.NONE
    assert torch.equal(WEIGHT, torch.ones(4, 4))
    assert torch.equal(torch.get_rng_state(), before)


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
    refused(world, "tp(2)", torch.optim.Adafactor, "Adafactor updates an element by looking at")
    refused(world, "zero(2)", ByGlobalNorm, "ByGlobalNorm updates a parameter by looking at others")
    refused(world, "pp(2)", ByGlobalNorm, "ByGlobalNorm updates a parameter by looking at others")


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
