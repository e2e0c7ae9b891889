"""What the planner says of memory is what the strategies' own plans say."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from shoal.observe.memory_estimate import memory_of, stage_sizes
from shoal.plan.sync_price.catalog import PRICERS, price_of
from shoal.plan.sync_price.flat_sizes import TensorSizes
from shoal.strategy.strategy import parse
from shoal.strategy.terms import TERMS
from shoal.sync.memory import ModelSizes
from tests.plan.sync_questions import ask, cluster_of

COMPRESSED = ("fp16", "bf16", "int8", "topk(0.1)", "powersgd(rank=2)", "onebit")
TEXTS = [
    "ddp",
    "ddp(bucket_mb=0.1)",
    *(f'ddp(compress="{name}")' for name in COMPRESSED),
    "zero(1)",
    "zero(2)",
    "zero(3)",
    *(f"zero({stage}, elastic=True, copies={copies})" for stage in (1, 2, 3) for copies in (1, 2)),
    'ps(placement="rank0")',
    'ps(placement="workers")',
    'ps(placement="workers", update="worker")',
    'ps(placement="rank0", quorum=0.75)',
    'ps(placement="rank0", staleness=2)',
    'ps(placement="workers", mode="async")',
    'ps(mode="async")',
    *(f'ps(placement="rank0", compress="{name}")' for name in COMPRESSED),
    'gossip(graph="ring")',
    'gossip(graph="star")',
    'gossip(graph="complete")',
    'gossip(graph="one-peer")',
    'gossip(mode="async")',
    "gossip(elastic=True)",
    "localsgd(every=8)",
    "localsgd(every=8, elastic=True)",
    'localsgd(every=8, outer="nesterov")',
    'localsgd(every=8, outer="adam")',
    *(f'localsgd(every=8, compress="{name}")' for name in COMPRESSED),
    "hogwild(momentum=True)",
    'mapreduce(batch="mini")',
]


def model() -> nn.Module:
    """900,000 parameters, in tensors below and above a megabyte."""
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(nn.Linear(128, 256), *blocks, nn.Linear(256, 1200), nn.Linear(1200, 256))


def tensors_of(sizes: ModelSizes) -> TensorSizes:
    index = {name: i for i, (name, _) in enumerate(sizes.flat.named)}
    units = tuple(tuple(index[name] for name in unit) for unit in sizes.units)
    return TensorSizes(tuple(tuple(p.shape) for p in sizes.flat.params), units)


@pytest.fixture(scope="module")
def sizes() -> ModelSizes:
    return stage_sizes(model(), partial(torch.optim.AdamW, lr=1e-3), None)[0]


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("text", ["single", *TEXTS])
def test_memory_by_kind_is_that_of_the_plan(text: str, replicas: int, sizes: ModelSizes) -> None:
    if text == "single" and replicas > 1:
        return
    strategy = parse(text)
    workers = memory_of(strategy, replicas, [sizes], [0])
    fullest = max(workers, key=lambda one: sum(vars(one).values()))
    question = ask(cluster_of(), replicas, sizes.flat.size, tensors=tensors_of(sizes))
    priced = price_of(strategy.sync_for(replicas), question).memory
    other = fullest.gathered + fullest.copies + fullest.residuals + fullest.in_flight
    other += fullest.shared + fullest.server
    whole = sum(vars(fullest).values())
    assert priced.total == pytest.approx(whole, rel=0.01)
    near = 0.01 * whole
    assert priced.parameters == pytest.approx(fullest.parameters, abs=near)
    assert priced.gradients == pytest.approx(fullest.gradients, abs=near)
    assert priced.optimizer == pytest.approx(fullest.optimizer, abs=near)
    assert priced.buffers == pytest.approx(other, abs=near)


def test_every_way_to_agree_has_a_price_and_is_tried_here() -> None:
    names = {name for name, term in TERMS.items() if term.role == "sync"}
    assert set(PRICERS) == names
    assert names == {text.partition("(")[0] for text in ["single", *TEXTS]}
