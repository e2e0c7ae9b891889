"""One optimizer step on gradients that are agreed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.runtime.trace import Recorder
from shoal.strategy.strategy import parse
from shoal.sync.optimizer_step import OptimizerStep
from shoal.train.job import Job
from tests.conftest import World
from tests.models import mlp, samples

SGD = partial(torch.optim.SGD, lr=0.1)


def named(*values: float) -> list[tuple[str, nn.Parameter]]:
    """Parameters of one element, each with the gradient 1."""
    found = []
    for i, value in enumerate(values):
        p = nn.Parameter(torch.tensor([value]))
        p.grad = torch.ones(1)
        found.append((f"p{i}", p))
    return found


def values(pairs: list[tuple[str, nn.Parameter]]) -> list[float]:
    return [round(p.item(), 6) for _, p in pairs]


def test_apply_is_one_optimizer_step() -> None:
    pairs = named(1.0, 2.0)
    OptimizerStep(pairs, SGD).apply()
    assert values(pairs) == [0.9, 1.9]


def test_the_learning_rate_is_asked_for_by_step_and_absolute() -> None:
    pairs = named(0.0)
    asked = []

    def lr(step: int) -> float:
        asked.append(step)
        return [1.0, 10.0, 100.0][step]

    update = OptimizerStep(pairs, SGD, lr=lr)
    for _ in range(3):
        update.apply()
    assert asked == [0, 1, 2]
    assert values(pairs) == [-111.0]


def by_name(pairs: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The first parameter learns as the optimizer does, the second half as fast, the third 4x."""
    by = dict(pairs)
    groups: list[dict[str, Any]] = [
        {"params": [by["p0"]]},
        {"params": [by["p1"]], "lr": 0.05},
        {"params": [by["p2"]], "lr": 0.4},
    ]
    return torch.optim.SGD(groups, lr=0.1)


def test_groups_keep_their_ratio_to_the_learning_rate() -> None:
    pairs = named(0.0, 0.0, 0.0)
    OptimizerStep(pairs, by_name, lr=lambda step: 2.0).apply()
    assert values(pairs) == [-2.0, -1.0, -8.0]


def test_groups_keep_their_rates_without_a_learning_rate_function() -> None:
    pairs = named(0.0, 0.0, 0.0)
    OptimizerStep(pairs, by_name).apply()
    assert values(pairs) == [-0.1, -0.05, -0.4]


def test_a_factory_without_a_rate_of_its_own_takes_the_function_s() -> None:
    pairs = named(0.0)
    OptimizerStep(pairs, partial(torch.optim.SGD, lr=0.0), lr=lambda step: 0.5).apply()
    assert values(pairs) == [-0.5]


def test_clipping_bounds_the_norm_of_the_whole_gradient() -> None:
    """Four gradients of 1 have the norm 2; clipped to 0.5 each is a quarter."""
    pairs = named(0.0, 0.0, 0.0, 0.0)
    OptimizerStep(pairs, partial(torch.optim.SGD, lr=1.0), clip_norm=0.5).apply()
    assert [p.item() for _, p in pairs] == pytest.approx([-0.25] * 4, rel=1e-5)


def test_a_gradient_below_the_bound_is_not_clipped() -> None:
    pairs = named(0.0, 0.0, 0.0, 0.0)
    OptimizerStep(pairs, partial(torch.optim.SGD, lr=1.0), clip_norm=2.5).apply()
    assert values(pairs) == [-1.0] * 4


def test_clipping_passes_over_parameters_without_a_gradient() -> None:
    pairs = named(0.0, 0.0)
    pairs[1][1].grad = None
    OptimizerStep(pairs, partial(torch.optim.SGD, lr=1.0), clip_norm=0.5).apply()
    assert [p.item() for _, p in pairs] == pytest.approx([-0.5, 0.0], rel=1e-5)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, float("nan")])
def test_a_bound_that_is_not_above_zero_is_refused(clip_norm: float) -> None:
    job = Job(parse("single"), solo_group(), device=torch.device("cpu"))
    with pytest.raises(BadInput, match="clip_norm has to be above 0"):
        job.step(mlp(), nn.CrossEntropyLoss(), optimizer=SGD, clip_norm=clip_norm)


@pytest.mark.parametrize(
    "factory", [lambda pairs: None, lambda pairs: list(pairs), lambda pairs: torch.optim.SGD]
)
def test_a_factory_that_makes_no_optimizer_is_refused(factory: Callable[..., Any]) -> None:
    with pytest.raises(BadInput, match="optimizer has to be a function from"):
        OptimizerStep(named(0.0), factory)


def test_an_optimizer_in_place_of_a_factory_is_refused() -> None:
    pairs = named(0.0)
    optimizer: Any = torch.optim.SGD([p for _, p in pairs], lr=0.1)
    with pytest.raises(BadInput, match="optimizer has to be a function from"):
        OptimizerStep(pairs, optimizer)


@pytest.mark.parametrize(
    "factory",
    [
        lambda pairs: torch.optim.SGD(pairs, lr=0.1),
        lambda pairs: torch.optim.SGD([p for _, p in pairs], lr=0.1),
        lambda pairs: torch.optim.SGD((p for _, p in pairs), lr=0.1),
        SGD,
    ],
    ids=["pairs", "a list", "a generator", "partial"],
)
def test_a_factory_may_be_any_function(factory: Callable[..., Any]) -> None:
    pairs = named(1.0, 2.0)
    OptimizerStep(pairs, factory).apply()
    assert values(pairs) == [0.9, 1.9]


def test_the_update_leaves_a_span() -> None:
    tracer = Recorder(0, 0)
    OptimizerStep(named(0.0), SGD, tracer=tracer).apply()
    assert [span.kind for span in tracer.spans] == ["update"]


def test_groups_by_name_train_alike_at_any_number_of_replicas(world: World) -> None:
    """No weight decay for biases, as scripts have it, and a schedule over both groups."""

    def decayed(pairs: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        pairs = list(pairs)
        groups = [
            {"params": [p for name, p in pairs if "bias" not in name], "weight_decay": 0.1},
            {"params": [p for name, p in pairs if "bias" in name], "lr": 1e-3},
        ]
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)

    def train(group: Group, model: nn.Module) -> list[Tensor]:
        job = Job(parse("ddp"), group, device=torch.device("cpu"))
        step = job.step(
            model, nn.CrossEntropyLoss(), optimizer=decayed, lr=lambda n: 1e-2 / (n + 1)
        )
        for batch in job.batches(samples(40), 10):
            step(batch)
        return [p.detach().clone() for p in step.model.parameters()]

    models = [mlp() for _ in range(3)]
    alone = train(solo_group(), mlp())
    for parameters in world(3, lambda g: train(g, models[g.rank])):
        for got, wanted in zip(parameters, alone, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
