"""One optimizer step on gradients that are agreed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.executors.solo import solo_group
from shoal.errors import BadInput
from shoal.runtime.trace import Recorder
from shoal.strategy.strategy import parse
from shoal.sync.optimizer_step import OptimizerStep
from shoal.train.job import Job
from tests.models import mlp

SGD = partial(torch.optim.SGD, lr=0.1)


def named(*values: float) -> list[tuple[str, nn.Parameter]]:
    """Parameters of one element, each with the gradient 1."""
    found = []
    for i, value in enumerate(values):
        p = nn.Parameter(torch.tensor([value]))
        p.grad = torch.ones(1)
        found.append((f"p{i}", p))
    return found


def test_the_learning_rate_is_asked_for_by_step_and_absolute() -> None:
    pairs = named(0.0)
    asked = []

    def lr(step: int) -> float:
        asked.append(step)
        return [1.0, 10.0, 100.0][step]

    update = OptimizerStep(pairs, SGD, lr=lr)
    tracer = update.tracer = Recorder(0, 0)
    for _ in range(3):
        update.apply()
    assert asked == [0, 1, 2] and [span.kind for span in tracer.spans] == ["update"] * 3
    assert pairs[0][1].item() == pytest.approx(-111.0)


def by_name(pairs: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The first parameter learns as the optimizer does, the second half as fast, the third 4x."""
    by = dict(pairs)
    groups: list[dict[str, Any]] = [
        {"params": [by["p0"]]},
        {"params": [by["p1"]], "lr": 0.05},
        {"params": [by["p2"]], "lr": 0.4},
    ]
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize(
    ("factory", "options", "updated"),
    [
        (by_name, {"lr": lambda step: 2.0}, [-2.0, -1.0, -8.0]),
        (by_name, {}, [-0.1, -0.05, -0.4]),
        (partial(SGD, lr=0.0), {"lr": lambda step: 0.5}, [-0.5]),
        (
            partial(SGD, lr=1.0),
            {"clip_norm": 0.5},
            [-0.25] * 4,
        ),  # four gradients of 1 have the norm 2
        (partial(SGD, lr=1.0), {"clip_norm": 2.5}, [-1.0] * 4),
        (partial(SGD, lr=1.0), {"clip_norm": 0.5}, [-0.5, 0.0]),
    ],
    ids=["ratio", "rates of groups", "no rate", "clipped", "not clipped", "no gradient"],
)
def test_what_a_step_does_to_gradients_of_1(
    factory: Callable[..., Any], options: dict[str, Any], updated: list[float]
) -> None:
    pairs = named(*[0.0] * len(updated))
    for (_, p), value in zip(pairs, updated, strict=True):
        p.grad = p.grad if value else None
    OptimizerStep(pairs, factory, **options).apply()
    assert [p.item() for _, p in pairs] == pytest.approx(updated, rel=1e-5)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, float("nan")])
def test_a_bound_that_is_not_above_zero_is_refused(clip_norm: float) -> None:
    job = Job(parse("single"), solo_group(), device=torch.device("cpu"))
    with pytest.raises(BadInput, match="clip_norm has to be above 0"):
        job.step(mlp(), nn.CrossEntropyLoss(), optimizer=SGD, clip_norm=clip_norm)


@pytest.mark.parametrize(
    "factory",
    [lambda pairs: None, list, lambda pairs: torch.optim.SGD, SGD([nn.Parameter(torch.zeros(1))])],
    ids=["nothing", "a list", "a class", "an optimizer in its place"],
)
def test_what_makes_no_optimizer_is_refused(factory: Any) -> None:
    with pytest.raises(BadInput, match="optimizer has to be a function from"):
        OptimizerStep(named(0.0), factory)
