"""Expert parallelism trains the mixture of experts that one worker trains."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.train.job import Job
from tests.conftest import World
from tests.products import few_or_all
from tests.splitting import (
    ADAMW,
    assert_each_goes_on,
    assert_equal,
    assert_own_loop_equal,
    on_workers,
    refused,
    train,
    workers,
)

WIDTH = 6
OPTIONS: dict[str, Any] = {"optimizer": ADAMW, "clip_norm": 0.5}


class Listed(nn.Module):
    """Experts that get no token are not called."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.mlps):
            token, choice = torch.where(chosen == index)
            if len(token):
                out.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
        return out


class StackedExperts(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, 5, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, 5) / 3)

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index in range(self.num_experts):
            token, choice = torch.where(top_k_index == index)
            hidden = F.silu(F.linear(x[token], self.up[index]))
            value = F.linear(hidden, self.down[index]) * top_k_weights[token, choice, None]
            out.index_add_(0, token, value)
        return out


class Stacked(nn.Module):
    Experts = StackedExperts

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = self.Experts(experts)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        return self.experts(x, chosen, weights)


class BatchedExperts(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 5) / 3)
        self.down = nn.Parameter(torch.randn(experts, 5, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ech,ehd->ecd", F.gelu(torch.einsum("ecd,edh->ech", x, self.up)),
                            self.down)  # fmt: skip


class Dispatched(nn.Module):
    """One-hot dispatch into places of experts, enough for all rows of any worker."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = BatchedExperts(experts)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        is_chosen = F.one_hot(chosen, self.gate.out_features)
        place = (is_chosen.cumsum(0) - 1).gather(1, chosen[:, None])[:, 0]
        dispatch = is_chosen[:, :, None] * F.one_hot(place, len(x))[:, None].to(x.dtype)
        out = self.experts(torch.einsum("sec,sd->ecd", dispatch, x))
        return torch.einsum("sec,ecd,s->sd", dispatch, out, weights)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def mixture(kind: type[nn.Module], experts: int = 4) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Residual(kind(experts)) for _ in range(2)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 3))


def samples(n: int) -> TensorDataset:
    """Most of them go to the same experts, so that some experts get none."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, WIDTH, generator=generator) + 2
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


BOTH = pytest.mark.parametrize("kind", [Listed, Stacked])
HYBRIDS = [
    f"{sync} + ep(2)"
    for sync in (
        *("zero(1)", "zero(2)", "zero(3)", 'gossip(graph="complete")'),
        "ddp(shared_weights=True)",
    )
]
PIPELINES = ["ep(2) + pp(2)", 'ep(2) + pp(2, recompute=True, schedule="gpipe")']


@BOTH
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp + ep(2)",
        *few_or_all([], ["ep(2)", "ep(4)", *HYBRIDS, *PIPELINES, "ddp + ep(2) + pp(2)"]),
        *few_or_all([], ['ep(2) + tp(2, plan={"0": "column", "3": "column"})']),
    ],
)
def test_equal_to_one_worker(world: World, strategy: str, kind: type[nn.Module]) -> None:
    make = partial(mixture, kind)
    assert_equal(world, workers(strategy), strategy, make, samples(22), 6, **OPTIONS)


@pytest.mark.whole
@BOTH
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}])
def test_workers_without_a_row(
    world: World, kind: type[nn.Module], options: dict[str, Any]
) -> None:
    make = partial(mixture, kind)
    assert_equal(world, 4, "ddp + ep(2)", make, samples(10), 8, **OPTIONS, **options)


@pytest.mark.parametrize(
    ("kind", "experts", "strategy"),
    [
        *((Dispatched, 4, "ep(2)"), (Stacked, 5, "ep(2)")),
        *few_or_all([], [(Dispatched, 4, s) for s in ("ddp + ep(2)", *HYBRIDS[1:3], PIPELINES[0])]),
        *few_or_all([], [(Listed, 5, s) for s in ("ep(2)", PIPELINES[0])]),
        *few_or_all([], [(Stacked, 5, "zero(2) + ep(2)")]),
    ],
)
def test_slabs_and_a_number_of_experts_that_does_not_divide(
    world: World, kind: type[nn.Module], experts: int, strategy: str
) -> None:
    make = partial(mixture, kind, experts)
    assert_equal(world, workers(strategy), strategy, make, samples(10), 6, **OPTIONS)


@pytest.mark.whole
def test_zero_3_gathers_the_experts_of_a_list_together(world: World) -> None:
    """Ranks call different experts of it."""
    assert_equal(world, 2, "zero(3)", partial(mixture, Listed), samples(22), 6, **OPTIONS)


@pytest.mark.parametrize("kind", [Listed, *few_or_all([], [Stacked])])
def test_checkpoints_go_to_one_worker_and_back(
    world: World, tmp_path: Path, kind: type[nn.Module]
) -> None:
    chain = ["ep(2)", "single", "ep(2)"]
    assert_each_goes_on(world, tmp_path, chain, partial(mixture, kind), samples(48), **OPTIONS)


@pytest.mark.product
@BOTH
@pytest.mark.parametrize("strategy", ["ep(2)", "ddp + ep(2)"])
def test_a_loop_of_the_scripts_own(world: World, kind: type[nn.Module], strategy: str) -> None:
    make = partial(mixture, kind)
    assert_own_loop_equal(world, workers(strategy), strategy, make, samples(10), F.cross_entropy)


class StackedCentered(Stacked):
    """An expert depends on the weights of the others."""

    class Centered(StackedExperts):
        def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return super().forward(x + self.up.mean((0, 1)), top_k_index, top_k_weights)

    Experts = Centered


class Regularized(Listed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(mlp[0].weight.sum() for mlp in self.mlps)  # type: ignore


@pytest.mark.parametrize(
    ("strategy", "make", "said"),
    [
        ("ep(2)", partial(mixture, StackedCentered), r"1.inner.experts does not compute"),
        ("ep(2)", partial(mixture, Regularized), r"cannot train Sequential: .* it fails with"),
        ("ep(2)", partial(nn.Linear, WIDTH, 3), r"ep\(2\) finds no mixture of experts in Linear"),
        ("ep(4)", partial(mixture, Stacked, 2), "at least 4 experts, and 1.inner.experts has 2"),
    ],
)
def test_what_cannot_be_split_is_refused(
    world: World, strategy: str, make: Callable[[], nn.Module], said: str
) -> None:
    assert re.search(said, refused(world, workers(strategy), strategy, make, samples(6)))


class Noisy(Listed):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x) if self.training else 0.0
        return super().forward(x) + noise


class Limited(Listed):
    """The first rows of a batch count."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (torch.arange(len(x)) < len(x) // 2)[:, None]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [(Noisy, "1.inner draws random numbers"), (Limited, "depends on other rows of the batch")],
)
def test_routing_that_differs_on_several_workers_is_reported(
    world: World, kind: type[nn.Module], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [mixture(kind) for _ in range(2)]
    world(2, lambda g: train(g, "ep(2)", models[g.rank], samples(8), 8))
    assert sentence in "".join(capsys.readouterr())


def test_evaluation_is_that_of_one_worker(world: World) -> None:
    def evaluate(job: Job, step: Any) -> Any:
        return job.evaluate(F.cross_entropy, samples(7), 3)

    make = partial(mixture, Listed)
    (alone,) = on_workers(world, "single", make, evaluate, **OPTIONS)
    for result in on_workers(world, "ep(2)", make, evaluate, **OPTIONS):
        assert result == pytest.approx(alone)


def test_tokens_above_the_capacity_are_dropped(world: World) -> None:
    """All of them fit where an expert takes as many as there are; else the model differs."""

    def losses_of(job: Job, step: Any) -> list[float]:
        return [float(step(batch)) for batch in job.batches(samples(6), 6)]

    losses = {
        strategy: on_workers(world, strategy, partial(mixture, Stacked), losses_of)[0]
        for strategy in ("ep(2)", "ep(2, capacity=2)", "ep(2, capacity=0.5)")
    }
    assert losses["ep(2, capacity=2)"] == losses["ep(2)"]
    assert losses["ep(2, capacity=0.5)"] != losses["ep(2)"]
