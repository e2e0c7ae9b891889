"""Bytes that a price says a worker sends are those that the runtime counts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.observe.memory_estimate import stage_sizes
from shoal.plan.sync_price.catalog import price_of
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.conftest import World
from tests.models import samples
from tests.plan.sync_questions import ask, cluster_of
from tests.plan.test_sync_memory import tensors_of

SGD = partial(torch.optim.SGD, lr=1e-2)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 200), nn.ReLU(), nn.Linear(200, 120), nn.Linear(120, 10))


def counted(world: World, size: int, text: str) -> float:
    """The mean over workers of what each sends in a step."""
    models = [model() for _ in range(size)]

    def body(group: Group) -> float:
        job = Job(parse(text), group, device=torch.device("cpu"), seed=1)
        step = job.step(models[group.rank], F.cross_entropy, optimizer=SGD)
        before = step.sync.report()["bytes_sent"]
        for batch in job.batches(samples(4 * 24, (40,)), 24):
            step(batch)
        sent: float = (step.sync.report()["bytes_sent"] - before) / 4
        job.close()
        return sent

    return sum(world(size, body)) / size


def priced(size: int, text: str) -> float:
    sizes = stage_sizes(model(), SGD, None)[0]
    question = ask(cluster_of(), size, sizes.flat.size, tensors=tensors_of(sizes))
    return price_of(parse(text).sync_for(size), question).sent_bytes


OTHERS = [
    'ddp(compress="int8")',
    'ddp(compress="powersgd(rank=4)")',
    "zero(1)",
    "zero(2)",
    'gossip(graph="one-peer")',
    'gossip(graph="star")',
    'localsgd(every=4, compress="topk(0.1)")',
    'mapreduce(batch="mini")',
    'ps(placement="rank0")',
]


@pytest.mark.parametrize(
    "text",
    [
        "ddp",
        "zero(3)",
        'gossip(graph="ring")',
        "localsgd(every=2)",
        *(pytest.param(text, marks=pytest.mark.whole) for text in OTHERS),
    ],
)
def test_traffic_is_what_the_runtime_counts(world: World, text: str) -> None:
    assert priced(3, text) == pytest.approx(counted(world, 3, text), rel=0.02)
