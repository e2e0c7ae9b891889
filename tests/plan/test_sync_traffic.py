"""Bytes that a price says a worker sends are those that the runtime counts."""

from __future__ import annotations

from functools import lru_cache, partial
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
from shoal.plan.workloads import Split
from shoal.plan.workloads.model_presets import transformer_named
from shoal.plan.workloads.traced_workload import TracedWorkload
from shoal.strategy.strategy import parse
from shoal.strategy.terms import TERMS
from shoal.sync.memory import ModelSizes
from shoal.train.job import Job
from tests.conftest import World
from tests.elastic import Workers
from tests.models import samples
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


BATCH = 16
ADAM = partial(torch.optim.AdamW, lr=1e-3)
PREDICTED = [
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


@pytest.mark.parametrize("text", PREDICTED)
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
