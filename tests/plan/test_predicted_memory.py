"""Memory that a prediction gives is what `shoal memory` says of the same script and strategy."""

from __future__ import annotations

from functools import lru_cache, partial

import pytest
import torch
from torch import nn

from shoal.observe.memory_estimate import memory_of, servers_of, split_model, stage_sizes
from shoal.observe.workload_trace import precision_for, trace_step
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.workloads.model_presets import transformer_named
from shoal.plan.workloads.traced_workload import TracedWorkload
from shoal.plan.workloads.workload import Split
from shoal.strategy.strategy import parse
from tests.plan.sync_questions import cluster_of

BATCH = 16
ADAM = partial(torch.optim.AdamW, lr=1e-3)
TEXTS = [
    "ddp",
    "zero(1)",
    "zero(2)",
    "zero(3)",
    "ps",
    'ps(placement="rank0")',
    'ps(placement="workers")',
    'ps(mode="async")',
    'gossip(graph="ring")',
    'gossip(graph="complete")',
    "localsgd(every=8)",
]


def uneven_model() -> nn.Module:
    """One layer has nearly all parameters, as where a vocabulary is large; one is frozen."""
    frozen = nn.Linear(64, 64)
    frozen.requires_grad_(False)
    return nn.Sequential(
        nn.Linear(64, 64),
        frozen,
        nn.ReLU(),
        nn.Linear(64, 40_000, bias=False),
        nn.Linear(40_000, 8),
    )


def even_model() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)) for _ in range(8)]
    return nn.Sequential(*blocks, nn.Linear(256, 8))


@lru_cache
def traced(name: str) -> TracedWorkload:
    if name == "even":
        return _traced(even_model(), 256)
    return _traced(uneven_model(), 64)


def _traced(model: nn.Module, width: int) -> TracedWorkload:
    content = (torch.zeros(BATCH, width), torch.zeros(BATCH, dtype=torch.long))
    loss = nn.functional.cross_entropy
    return trace_step(model, loss, content, precision_for(model, ADAM, "fp32"))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["uneven", pytest.param("even", marks=pytest.mark.whole)])
def test_memory_is_what_the_runtime_estimates(name: str, text: str) -> None:
    strategy = parse(text)
    model = {"uneven": uneven_model, "even": even_model}[name]()
    sizes = stage_sizes(model, ADAM, None)
    workers = memory_of(strategy, 4, sizes, [0])
    servers = servers_of(strategy, 4, sizes)
    prediction = Predictor(traced(name), cluster_of()).predict(strategy, 4, PlanSettings(BATCH))
    memory = prediction.memory
    most = max(sum(vars(one).values()) for one in workers)
    assert memory.total - memory.activations == pytest.approx(most, rel=0.01)
    assert memory.servers == pytest.approx(max(servers, default=0), rel=0.01)


@pytest.mark.whole
@pytest.mark.parametrize("text", ["ddp + pp(2)", "zero(2) + pp(2)", "zero(3) + pp(2)"])
def test_memory_of_stages_is_what_the_runtime_estimates(text: str) -> None:
    strategy = parse(text)
    sizes = stage_sizes(even_model(), ADAM, split_model(even_model(), strategy.pp))
    workers = memory_of(strategy, 4, sizes, [0] * len(sizes))
    prediction = Predictor(traced("even"), cluster_of()).predict(strategy, 4, PlanSettings(BATCH))
    most = max(sum(vars(one).values()) for one in workers)
    # stages have equal seconds in one and equal parameters in the other: a block more or less
    assert prediction.memory.total - prediction.memory.activations == pytest.approx(most, rel=0.15)


def test_a_gathered_layer_and_the_largest_gradient_are_part_of_zero() -> None:
    """ZeRO's formula, (2 + 2 + 12) P / n, is what is left where a layer is small beside a shard."""
    many = transformer_named("layers=400,hidden=512,heads=8,vocab=1024")
    few = transformer_named("layers=1,hidden=8192,heads=64,vocab=1024")
    for model, layers in ((many, 400), (few, 1)):
        parameters = sum(
            run.count * model.cost(i, Split()).parameters for i, run in enumerate(model.runs)
        )
        block = model.cost(1, Split()).parameters
        predictor = Predictor(model, cluster_of())
        memory = predictor.predict(parse("zero(3)"), 8, PlanSettings(8)).memory
        formula = 16 * parameters / 8
        held = memory.total - memory.activations
        if layers == 400:
            assert held == pytest.approx(formula, rel=0.06)
        assert memory.buffers >= 2 * block * 7 / 8 * 0.99  # bytes of others' parts of a block
        assert held >= formula + memory.buffers
