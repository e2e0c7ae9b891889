"""Bytes that a price says a worker sends are those that the runtime counts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

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
from tests.elastic import Workers
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
        sent = sent_by(job, models[group.rank])
        job.close()
        return sent

    return sum(world(size, body)) / size


def sent_by(job: Job, model: nn.Module) -> float:
    """In one step, of those after the first one."""
    step = job.step(model, F.cross_entropy, optimizer=SGD)
    counts = []
    for batch in job.batches(samples(5 * 24, (40,)), 24):
        step(batch)
        counts.append(step.sync.report()["bytes_sent"])
    return float(counts[-1] - counts[0]) / 4


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


@pytest.mark.parametrize(
    "text",
    [
        "zero(2, elastic=True)",
        pytest.param("zero(1, elastic=True)", marks=pytest.mark.whole),
        pytest.param("zero(3, elastic=True)", marks=pytest.mark.whole),
        pytest.param("zero(3, elastic=True, copies=2)", marks=pytest.mark.whole),
    ],
)
def test_so_is_that_of_the_copies_of_elastic_shards(tmp_path: Path, text: str) -> None:
    models = [model() for _ in range(4)]
    workers = Workers(tmp_path, 4, lambda _, job: sent_by(job, models[job.rank]), text)
    workers.run()
    assert priced(4, text) == pytest.approx(sum(workers.results.values()) / 4, rel=0.02)
