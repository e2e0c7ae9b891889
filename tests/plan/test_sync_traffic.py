"""Bytes that a price says a worker sends are those that the runtime counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.observe.memory_estimate import memory_of, servers_of, split_model, stage_sizes
from shoal.observe.workload_trace import precision_for, trace_step
from shoal.plan.predict import PRICERS, PlanSettings, Predictor, price_of
from shoal.plan.sync_price.flat_sizes import TensorSizes
from shoal.plan.workloads import Split, parameters_of
from shoal.plan.workloads.model_presets import transformer_named
from shoal.strategy.strategy import parse
from shoal.strategy.terms import TERMS
from shoal.sync.memory import ModelSizes
from shoal.train.job import Job
from tests.conftest import World
from tests.elastic import Workers
from tests.models import samples
from tests.plan.test_sync_price import ask, cluster_of
from tests.products import few_or_all

COMPRESSED = ("fp16", "bf16", "int8", "int4", "topk(0.1)", "powersgd(rank=2)", "onebit")
SYNCS = {name: term for name, term in TERMS.items() if term.role == "sync"}
TEXTS = [
    "single",
    *(text for term in SYNCS.values() for text in term.compared if text != "mapreduce"),
    "ddp(bucket_mb=0.1)",
    *(f"zero({stage}, elastic=True, copies={copies})" for stage in (1, 2, 3) for copies in (1, 2)),
    *(f'ps(placement="{place}")' for place in ("rank0", "workers")),
    'ps(placement="workers", update="worker")',
    'ps(placement="rank0", quorum=0.75)',
    'ps(placement="workers", mode="async")',
    'gossip(graph="star")',
    'gossip(graph="one-peer")',
    "gossip(elastic=True)",
    "localsgd(every=8, elastic=True)",
    'localsgd(every=8, outer="adam")',
    'localsgd(every=8, outer="nesterov", overlap=True, delay=4, fragments=2)',
    "hogwild(momentum=True)",
    *(
        f'{term}, compress="{name}")'
        for term in ("ddp(bucket_mb=25", 'ps(placement="rank0"', "localsgd(every=8")
        for name in COMPRESSED
    ),
]


def deep_model() -> nn.Module:
    """900,000 parameters, in tensors below and above a megabyte."""
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(nn.Linear(128, 256), *blocks, nn.Linear(256, 1200), nn.Linear(1200, 256))


def tensors_of(sizes: ModelSizes) -> TensorSizes:
    index = {name: i for i, (name, _) in enumerate(sizes.flat.named)}
    units = tuple(tuple(index[name] for name in unit) for unit in sizes.units)
    return TensorSizes(tuple(tuple(p.shape) for p in sizes.flat.params), units)


@pytest.fixture(scope="module")
def sizes() -> ModelSizes:
    return stage_sizes(deep_model(), partial(torch.optim.AdamW, lr=1e-3), None)[0]


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("text", TEXTS)
def test_memory_by_kind_is_that_of_the_plan(text: str, replicas: int, sizes: ModelSizes) -> None:
    if text == "single" and replicas > 1:
        return
    strategy = parse(text)
    workers = memory_of(strategy, replicas, [sizes], [0])
    fullest = max(workers, key=lambda one: sum(vars(one).values()))
    question = ask(cluster_of(), replicas, sizes.flat.size, tensors=tensors_of(sizes))
    priced = price_of(strategy.sync_for(replicas), question).memory
    whole = sum(vars(fullest).values())
    assert priced.total == pytest.approx(whole, rel=0.01)
    known = {name: getattr(fullest, name) for name in ("parameters", "gradients", "optimizer")}
    for name, wanted in (known | {"buffers": whole - sum(known.values())}).items():
        assert getattr(priced, name) == pytest.approx(wanted, abs=0.01 * whole), name
    servers = servers_of(strategy, replicas, [sizes])
    assert priced.servers == pytest.approx(max(servers, default=0), rel=0.01)


def test_every_way_to_agree_has_a_price_and_is_tried_here() -> None:
    assert set(PRICERS) == set(SYNCS) == {text.partition("(")[0] for text in TEXTS}


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


QUICK = ["ddp", "zero(3)", 'gossip(graph="ring")', "localsgd(every=2)"]
OTHERS = [
    *(f'ddp(compress="{name}")' for name in ("int8", "powersgd(rank=4)")),
    *("zero(1)", "zero(2)", 'mapreduce(batch="mini")', 'ps(placement="rank0")'),
    *(f'gossip(graph="{graph}")' for graph in ("one-peer", "star")),
    'localsgd(every=4, compress="topk(0.1)")',
    "localsgd(every=4, overlap=True, fragments=4)",
]


@pytest.mark.parametrize("text", few_or_all(QUICK, QUICK + OTHERS))
def test_traffic_is_what_the_runtime_counts(world: World, text: str) -> None:
    assert priced(3, text) == pytest.approx(counted(world, 3, text), rel=0.02)


ELASTIC = [f"zero({stage}, elastic=True)" for stage in (2, 1, 3)]


@pytest.mark.parametrize(
    "text", few_or_all(ELASTIC[:1], [*ELASTIC, "zero(3, elastic=True, copies=2)"])
)
def test_so_is_that_of_the_copies_of_elastic_shards(tmp_path: Path, text: str) -> None:
    models = [model() for _ in range(4)]
    workers = Workers(tmp_path, 4, lambda _, job: sent_by(job, models[job.rank]), text)
    workers.run()
    assert priced(4, text) == pytest.approx(sum(workers.results.values()) / 4, rel=0.02)


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
