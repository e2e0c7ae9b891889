"""What a plan takes a worker to hold is what the runtime estimates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.observe.memory_estimate import memory_of, split_model, stage_sizes
from shoal.observe.workload_trace import precision_for, trace_step
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.workloads import Split, parameters_of
from shoal.plan.workloads.model_presets import transformer_named
from shoal.schedules.steps.catalog import STEPS
from shoal.strategy.strategy import parse
from shoal.strategy.terms import TERMS
from tests.plan.test_sync_price import cluster_of
from tests.products import few_or_all

SYNCS = {name for name, term in TERMS.items() if term.role == "sync"}


def test_every_way_to_agree_has_a_step() -> None:
    assert set(STEPS) == SYNCS


def uneven_model() -> nn.Module:
    """One layer has nearly all parameters, as where a vocabulary is large; one is frozen."""
    frozen = nn.Linear(64, 64).requires_grad_(False)
    large = (nn.Linear(64, 40_000, bias=False), nn.Linear(40_000, 8))
    return nn.Sequential(nn.Linear(64, 64), frozen, nn.ReLU(), *large)


def even_model() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)) for _ in range(8)]
    return nn.Sequential(*blocks, nn.Linear(64, 8))


# stages have equal seconds in one and equal parameters in the other: a block more or less
STAGES = [
    (even_model, text, 0.15) for text in ("ddp + pp(2)", "zero(2) + pp(2)", "zero(3) + pp(2)")
]
ADAM = partial(torch.optim.AdamW, lr=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("make", "text", "near"),
    [
        *((uneven_model, text, 0.01) for text in ("ddp", "zero(3)", "ps")),
        *few_or_all(STAGES[:0], STAGES),
    ],
)
def test_memory_of_a_traced_model_is_what_the_runtime_estimates(
    make: Callable[[], nn.Module], text: str, near: float, precision: str
) -> None:
    strategy, model = parse(text), make()
    sizes = [
        replace(stage, is_cast=precision == "bf16")
        for stage in stage_sizes(model, ADAM, split_model(model, strategy.pp))
    ]
    workers = memory_of(strategy, 4, sizes, [0] * len(sizes))
    content = (torch.zeros(16, 64), torch.zeros(16, dtype=torch.long))
    traced = trace_step(model, F.cross_entropy, content, precision_for(model, ADAM, precision))
    memory = Predictor(traced, cluster_of()).predict(strategy, 4, PlanSettings(16)).memory
    most = max(sum(vars(one).values()) for one in workers)
    room = max(4 * p.numel() for p in model.parameters())  # of a gradient, before it is added
    assert memory.total - memory.activations - room == pytest.approx(most, rel=near)


@pytest.mark.parametrize(
    "sizes", ["layers=400,hidden=512,heads=8", "layers=1,hidden=8192,heads=64"]
)
def test_a_gathered_layer_and_the_largest_gradient_are_part_of_zero(sizes: str) -> None:
    """ZeRO's formula, (2 + 2 + 12) P / n, is what is left where a layer is small beside a shard."""
    model = transformer_named(f"{sizes},vocab=1024")
    formula = 16 * parameters_of(model) / 8
    memory = Predictor(model, cluster_of()).predict(parse("zero(3)"), 8, PlanSettings(8)).memory
    held = memory.total - memory.activations
    if "layers=400" in sizes:
        assert held == pytest.approx(formula, rel=0.06)
    block = model.cost(1, Split()).parameters
    assert memory.buffers >= 2 * block * 7 / 8 * 0.99  # bytes of others' parts of it
    assert held >= formula + memory.buffers
