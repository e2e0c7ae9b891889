"""Several models under tp: one without a layer that can be split stays whole."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from shoal.errors import BadInput
from shoal.replica.tensor.planning.plan import plan_of
from shoal.strategy.split_terms import Tp
from shoal.train.job import Job
from tests.conftest import World
from tests.models import mlp, samples
from tests.train.test_own_loop import assert_equal_to_single, run


class Judge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = spectral_norm(nn.Linear(3, 8))
        self.b = spectral_norm(nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.b(self.a(x).relu())
        return logits


JUDGE = Judge()


def two(job: Job, model: nn.Module) -> list[float]:
    judge = deepcopy(JUDGE)  # ranks are threads with one generator
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, eps=1e-3) for m in (model, judge)]
    model, judge, first, second = job.setup(model, judge, *optimizers)
    losses = []
    for x, y in job.batches(samples(30), 10):
        losses.append(float(job.backward(F.cross_entropy(judge(model(x)), y))))
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    "strategy",
    [
        "tp(2)",
        'tp(2, plan={"0": "column", "2": "row"})',
        pytest.param("ddp + tp(2)", marks=pytest.mark.whole),
        pytest.param("zero(3) + tp(2)", marks=pytest.mark.whole),
    ],
)
def test_one_is_whole_beside_one_that_is_split(world: World, strategy: str) -> None:
    assert_equal_to_single(world, 4 if "+" in strategy else 2, strategy, two)


def test_nothing_is_split_at_all(world: World) -> None:
    models = [Judge(), Judge()]
    with pytest.raises(BadInput, match="nothing to split in Judge"):
        world(2, lambda g: run(g, "tp(2)", models[g.rank], two))


class Binary(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.sign(), self.bias)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Judge, "the weight of a and 1 more is computed from other tensors"),
        (lambda: nn.Sequential(weight_norm(nn.Linear(4, 4))), "the weight of 0 is computed"),
        (partial(nn.Sequential, Binary(4, 4)), "0 is a Binary, a subclass of nn.Linear with a"),
    ],
)
def test_the_reason_is_said(make: type[nn.Module], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        plan_of(make(), Tp(2))


def test_mlp_can_be_split() -> None:
    assert plan_of(mlp(), Tp(2))
