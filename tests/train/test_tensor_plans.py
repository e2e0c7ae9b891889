"""Several models under tp: one without a layer that can be split stays whole."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from shoal.train.job import Job
from tests.conftest import World
from tests.models import samples
from tests.train.test_own_loop import assert_equal_to_single


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
