"""Pipelines train the model that one worker trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.examples.gpt import GPT, VOCABULARY, Size, adamw, next_token_loss
from shoal.group.group import Group
from shoal.group.solo import SoloGroup
from shoal.job import Job
from shoal.snapshot import whole_model
from shoal.strategy import SCHEDULES, parse
from tests.conftest import World
from tests.models import samples

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)
ADAMW = partial(adamw, lr=1e-2)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    widths = [6, 10, 8, 9, 7, 8, 6, 9, 3]
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def gpt(layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return GPT(Size(layers, 8, 2, 6, 1e-2))


def texts(n: int, context: int = 6) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (n, context), generator=generator)
    return TensorDataset(tokens, tokens.roll(-1, 1))


def train(
    group: Group,
    strategy: str,
    model: nn.Module,
    data: Any,
    batch_size: int | None,
    loss: Any = F.cross_entropy,
    **options: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    job = Job(parse(strategy), group, device=torch.device("cpu"), seed=3)
    step = job.step(model, loss, **{"optimizer": SGD, **options})
    losses = [float(step(batch)) for batch in job.batches(data, batch_size)]
    return losses, whole_model(step)[0]


def assert_equal(
    world: World,
    size: int,
    strategy: str,
    make: Callable[[], nn.Module],
    data: Any,
    batch_size: int | None = 8,
    exactly: bool = False,
    **options: Any,
) -> None:
    models = [make() for _ in range(size)]
    alone = train(SoloGroup(), "single", make(), data, batch_size, **options)
    together = world(
        size, lambda g: train(g, strategy, models[g.rank], data, batch_size, **options)
    )
    for losses, _ in together:
        assert losses == (alone[0] if exactly else pytest.approx(alone[0], abs=2e-5))
    whole = together[0][1]
    assert list(whole) == list(alone[1])
    for name, tensor in alone[1].items():
        if exactly:
            assert torch.equal(whole[name], tensor), name
        else:
            torch.testing.assert_close(whole[name], tensor, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [2, 4])
def test_an_mlp_under_every_schedule(world: World, size: int, schedule: str) -> None:
    strategy = f'pp({size}, schedule="{schedule}")'
    assert_equal(world, size, strategy, mlp, samples(28), 12, clip_norm=0.1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [2, 4])
def test_a_gpt_with_tied_embedding_under_every_schedule(
    world: World, size: int, schedule: str
) -> None:
    strategy = f'pp({size}, schedule="{schedule}", microbatches=4)'
    make = partial(gpt, 8 if size == 4 else 4)
    options = {"optimizer": ADAMW, "clip_norm": 1.0, "loss": next_token_loss}
    assert_equal(world, size, strategy, make, texts(16), 8, **options)
