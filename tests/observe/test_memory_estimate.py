"""What a strategy says of its step is what a worker holds and what its group counts as sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal import Embedding
from shoal.cluster.presets import load_cluster
from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.observe.memory_estimate import (
    WorkerMemory,
    estimate_memory,
    memory_of,
    split_model,
    stage_activations,
    stage_sizes,
)
from shoal.observe.memory_probe import ModelProbe
from shoal.observe.model_sizes import activation_bytes, loop_sizes, other_bytes
from shoal.observe.workload_trace import study_workload
from shoal.plan.predict import PlanSettings, predict
from shoal.plan.search import SearchOptions, search
from shoal.runtime.config import MemoryEstimateConfig, WorkloadTraceConfig
from shoal.schedules.steps.catalog import step_of
from shoal.strategy.base import Batches
from shoal.strategy.strategy import parse
from shoal.strategy.terms import TERMS
from shoal.train.job import Job
from shoal.worker.auto import read_trace
from tests.conftest import World
from tests.jobs import CPU
from tests.models import convnet, mlp, samples
from tests.products import few_or_all

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
ADAGRAD = partial(torch.optim.Adagrad, lr=1e-2)
OFFLOAD = [f"zero({stage}, offload=True)" for stage in (1, 2, 3)]
COMPRESSED = ("fp16", "bf16", "int8", "int4", "topk(0.1)", "powersgd(rank=2)", "onebit")
HEADER = 256  # bytes of loss and flags, which some syncs copy
REQUESTS = 1000  # bytes of them and of their answers, besides the numbers
STEPS = 8  # as many as localsgd(every=8) needs to agree
BATCH = 24  # rows


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(40, 72), nn.ReLU(), nn.Linear(72, 33), nn.ReLU(), nn.Linear(33, 10)
    )


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(40, 40) for _ in range(8)))


def tied() -> nn.Module:
    """The first and the last layer are one weight, which both stages of two hold."""
    torch.manual_seed(0)
    first, last = nn.Linear(40, 40), nn.Linear(40, 40)
    last.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), last)


class Taken(NamedTuple):
    memory: WorkerMemory
    sent: float | None  # bytes in a step; None: its sync counts none


def measured(
    world: World, size: int, text: str, make: Callable[[], nn.Module], **options: Any
) -> list[Taken]:
    models = [make() for _ in range(size)]
    data = samples(STEPS * BATCH, (1, 4, 4) if make is convnet else (40,))

    def body(group: Group) -> Taken:
        job = Job(parse(text), group, device=CPU, seed=1)
        step = job.step(models[group.rank], F.cross_entropy, **options)
        probe = ModelProbe(step)
        counts = []
        for batch in job.batches(data, BATCH):
            step(batch)
            probe.look()
            counts.append(step.sync.report().get("bytes_sent"))
        job.close()
        half = STEPS // 2  # the first steps also hand out the weights
        sent = None if counts[-1] is None else (counts[-1] - counts[half - 1]) / half
        return Taken(probe.memory(), sent)

    found: list[Taken] = world(size, body)
    return found


class Said(NamedTuple):
    memory: list[WorkerMemory]
    sent: float  # bytes in a step, the mean over workers


def estimated(
    size: int, text: str, make: Callable[[], nn.Module], optimizer: Any, **sizes: Any
) -> Said:
    strategy = parse(text)
    model = make()
    split = split_model(model, strategy.pp)
    replicas = strategy.layout(size).replicas
    is_turn = strategy.sync_for(replicas).batches is Batches.IN_TURNS
    microbatches = 2 * split.stages if split else 2 if sizes.get("accumulates") else 1
    microbatches = sizes.get("exact_microbatches", 0) // replicas or microbatches
    rows = BATCH // microbatches // (1 if is_turn else replicas)
    micro = (batch_of(make)[:rows], torch.zeros(rows, dtype=torch.int64))
    virtual = activation_bytes(model, F.cross_entropy, micro, "fp32", split)
    given = {"microbatches": microbatches, **sizes}
    stages = [replace(one, **given) for one in stage_sizes(model, optimizer, split)]
    activations = stage_activations(virtual, strategy.pp, microbatches)
    term = strategy.sync_for(replicas)
    steps = [step_of(term, stages[0], replicas, rank) for rank in range(replicas)]
    sent = sum(step.sent_bytes(replicas) for step in steps) / replicas
    return Said(memory_of(strategy, size, stages, activations), sent)


def batch_of(make: Callable[[], nn.Module]) -> Tensor:
    return torch.zeros(BATCH, *((1, 4, 4) if make is convnet else (40,)))


def compare(
    world: World,
    size: int,
    text: str,
    make: Callable[[], nn.Module] = perceptron,
    optimizer: Any = ADAMW,
    options: dict[str, Any] | None = None,
    **sizes: Any,
) -> None:
    found = measured(world, size, text, make, optimizer=optimizer, **(options or {}))
    expected = estimated(size, text, make, optimizer, **sizes)
    for estimate, taken in zip(expected.memory, found, strict=True):
        for column, value in asdict(taken.memory).items():
            assert getattr(estimate, column) == pytest.approx(value, abs=HEADER), column
    sent = [taken.sent for taken in found if taken.sent is not None]
    if sent and not parse(text).splits:
        frames = REQUESTS if parse(text).sync_for(size).has_servers else HEADER
        assert expected.sent == pytest.approx(sum(sent) / size, rel=0.02, abs=frames)


def test_weights_gathered_in_the_dtype_of_autocast(world: World) -> None:
    found = measured(world, 2, "zero(3)", perceptron, optimizer=ADAMW, precision="bf16")
    expected = estimated(2, "zero(3)", perceptron, ADAMW, is_cast=True)
    whole = estimated(2, "zero(3)", perceptron, ADAMW)
    for rank, taken in enumerate(found):
        assert taken.memory.gathered == expected.memory[rank].gathered
        assert taken.memory.parameters == expected.memory[rank].parameters
        assert taken.memory.gathered != whole.memory[rank].gathered


SINGLE_AND_SUMS = ["single", "ddp", "ddp(bucket_mb=0.01)", 'mapreduce(batch="mini")']
ZERO = ["zero(1)", "zero(2)", "zero(3)", "zero(1, elastic=True)", "zero(3, elastic=True)"]
LOCALSGD = [
    "localsgd(every=2)",
    'localsgd(every=2, outer="sgd(lr=1.0)")',
    'localsgd(every=2, outer="nesterov")',
    'localsgd(every=2, outer="adam")',
    "localsgd(every=2, overlap=True)",
    'localsgd(every=4, outer="adam", overlap=True, delay=2, fragments=2)',
]
GOSSIP = [f'gossip(graph="{g}")' for g in ("ring", "star", "complete", "one-peer", "exponential")]
SHARED = [
    f"{one}shared_weights=True)"
    for one in ("ddp(", "zero(1, ", "zero(2, ", 'mapreduce(batch="mini", ', "gossip(")
]
PS = [
    f"ps({options})"
    for options in (
        'placement="rank0"',
        'placement="workers"',
        'placement="rank0", update="worker"',
        'placement="workers", update="worker"',
        'placement="rank0", quorum=0.75',
        'placement="rank0", staleness=2',
        'placement="workers", mode="async"',
    )
]


@pytest.mark.product(most=6)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("text", [*SINGLE_AND_SUMS, *ZERO, *LOCALSGD, *SHARED])
def test_strategies_hold_and_send_what_their_step_says(world: World, text: str, size: int) -> None:
    compare(world, 1 if text == "single" else size, text)


EXACT = {"options": {"exact": True, "microbatches": 6}, "exact_microbatches": 6}
ACCUMULATED = {"options": {"accumulate": 2}, "accumulates": True}


@pytest.fixture
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard of the small model is several buckets, and is updated in as many chunks."""
    monkeypatch.setattr("shoal.schedules.buffer_layout._SMALLEST_BUCKET_BYTES", 2048)


@pytest.mark.product
@pytest.mark.parametrize("given", [{}, ACCUMULATED, EXACT], ids=["plain", "accumulated", "exact"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("text", OFFLOAD)
def test_offload_holds_on_the_device_and_on_the_host_what_its_step_says(
    world: World, several_chunks: None, text: str, size: int, given: dict[str, Any]
) -> None:
    compare(world, size, text, deep, **given)
    [worker, *_] = estimated(size, text, deep, ADAMW).memory
    state = worker.host // {1: 8, 2: 12, 3: 16}[int(text[5])] * 8
    assert worker.optimizer < 0.6 * state or size == 3  # of which two chunks are on the device


CASES: list[tuple[int, str, dict[str, Any]]] = [
    *((4, text, {}) for text in GOSSIP),
    *((4, text, {}) for text in SHARED),
    (4, f"{SHARED[0]} + pp(2)", {}),
    (2, 'gossip(mode="async")', {"make": convnet}),  # pages with statistics
    # one copy that all share
    *((2, "hogwild(momentum=True)", {"make": convnet, "optimizer": o}) for o in (SGD, ADAGRAD)),
    *((3, text, {}) for text in PS),
    # exact steps hold partial sums, accumulated gradients wait at the parameters
    *((3, text, EXACT) for text in ("ddp", "zero(1)", "zero(3)", 'ps(placement="rank0")')),
    *((2, text, ACCUMULATED) for text in ("ddp", "zero(1)", "zero(2)", 'ps(placement="rank0")')),
    *((1, "single", kind) for kind in (EXACT, ACCUMULATED)),
    # the other layers of a stage are on the meta device, which takes no memory
    (2, "pp(2)", {}),
    *((4, f"{text} + pp(2)", {}) for text in ("ddp", "zero(1)", "localsgd")),
]


@pytest.mark.parametrize(("size", "text", "given"), few_or_all(CASES[::2], CASES))
def test_workers_hold_and_send_what_their_step_says(
    world: World, size: int, text: str, given: dict[str, Any]
) -> None:
    compare(world, size, text, **given)


@pytest.mark.product
@pytest.mark.parametrize("compress", COMPRESSED)
@pytest.mark.parametrize(
    "text",
    [
        "ddp(compress='{}')",
        "ddp(bucket_mb=0.01, compress='{}')",
        "localsgd(every=2, compress='{}')",
        "localsgd(every=1, outer='nesterov', compress='{}')",
        "localsgd(every=2, fragments=2, compress='{}')",
        "localsgd(every=4, overlap=True, delay=1, fragments=2, compress='{}')",
        "ps(placement='rank0', compress='{}')",
        "ps(placement='workers', compress='{}')",
        "ps(placement='rank0', quorum=0.75, compress='{}')",
    ],
)
def test_compression_holds_and_sends_what_it_says(world: World, text: str, compress: str) -> None:
    compare(world, 3, text.format(compress))


@pytest.mark.whole
@pytest.mark.product
@pytest.mark.parametrize("compress", ["int8", "powersgd(rank=2)"])
@pytest.mark.parametrize(
    "text",
    [
        "ddp(compress='{}')",
        "localsgd(every=2, compress='{}')",
        "ps(placement='rank0', compress='{}')",
    ],
)
def test_compression_on_stages_keeps_no_residual_of_the_copy_of_a_tied_weight(
    world: World, text: str, compress: str
) -> None:
    """Which positions these are is held, 8 bytes each."""
    compare(world, 4, text.format(compress) + " + pp(2)", tied)


def test_stages_keep_activations_of_the_microbatches_under_way(world: World) -> None:
    """1F1B on two stages: the first keeps two micro-batches, the second one."""
    found = measured(world, 2, 'pp(2, microbatches=4, cuts=["2"])', perceptron, optimizer=SGD)
    rows = BATCH // 4
    assert found[0].memory.activations == 2 * rows * (40 + 72) * 4  # inputs and outputs of ReLU
    received = rows * 72 * 4
    loss = rows * 10 * 4 + rows * 8 + 4  # log-probabilities, targets, their weight
    assert found[1].memory.activations == received + rows * 33 * 4 + loss


# a new term is compared from its definition on; servers are above, with those inside workers
DEFAULTS = [
    text
    for term in TERMS.values()
    if term.role == "sync"
    for text in term.compared
    if "ps" not in text and "hogwild" not in text and text != "mapreduce"
]


@pytest.mark.whole
@pytest.mark.parametrize("text", DEFAULTS)
def test_what_is_compared_by_default_holds_and_sends_what_it_says(world: World, text: str) -> None:
    compare(world, 4, text)


def test_every_sync_term_is_measured_here() -> None:
    names = {parse(text).terms[0].name for text in [*DEFAULTS, *PS]}
    assert names | {"single", "hogwild"} == {n for n, t in TERMS.items() if t.role == "sync"}


def test_models_and_their_optimizers_are_counted() -> None:
    model = mlp()
    target = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (sizes,) = loop_sizes([model, target], [optimizer])
    trained = sum(p.nbytes for p in model.parameters())
    assert sizes.whole_state == trained
    assert other_bytes([model, target], [sizes]) == 4 * (16 + 4)


def test_a_loop_of_the_scripts_own_is_estimated(tmp_path: Path) -> None:
    def train(job: Job) -> None:
        model = mlp()
        _, optimizer = job.setup(model, torch.optim.Adam(model.parameters()))
        for _ in job.batches(samples(20), 10):
            optimizer.step()
        raise AssertionError("the estimate ends before the first batch")

    def make(kind: type[Job]) -> Job:
        return kind(parse("single"), solo_group(), device=CPU)

    estimate_memory(MemoryEstimateConfig(tmp_path, "zero(2)", 2), train, make)
    [found] = json.loads((tmp_path / "estimate.json").read_text())
    whole = sum(p.nbytes for p in mlp().parameters())
    assert [worker["activations"] for worker in found["workers"]] == [None, None]
    assert all(worker["parameters"] >= whole for worker in found["workers"])
    assert sum(worker["optimizer"] for worker in found["workers"]) >= 2 * whole


def test_rows_of_an_embedding_have_a_size_where_they_are_stored_and_a_price(tmp_path: Path) -> None:
    """30,000 rows of 8 numbers, each with its sum of Adagrad, an id and a place."""
    number, held = 30_000, 30_000 * (8 * 4 * 2 + 12)

    def train(job: Job) -> None:
        rows = Embedding(number, 8, optimizer=partial(torch.optim.Adagrad, lr=0.1))
        model = nn.Sequential(rows, nn.Flatten(), nn.Linear(5 * 8, 1))
        step = job.step(model, lambda y, t: y.sum(), optimizer=partial(torch.optim.SGD, lr=0.1))
        step((torch.zeros(20, 5, dtype=torch.long), torch.zeros(20)))
        step(None)

    def make(kind: type[Job]) -> Job:
        return kind(parse("single"), solo_group(), device=CPU)

    texts = ["ps(servers=2)", 'ps(placement="workers")', "ddp"]
    estimate_memory(MemoryEstimateConfig(tmp_path, "\n".join(texts), 4), train, make)
    servers, inside, ddp = json.loads((tmp_path / "estimate.json").read_text())
    assert min(servers["servers"]) >= held / 2 > max(servers["servers"]) - 2000
    assert all(worker["server"] >= held / 4 for worker in inside["workers"])
    assert "under ps, not otherwise" in ddp["refused"]

    study_workload(WorkloadTraceConfig(tmp_path), train, make)
    workload, _ = read_trace(tmp_path)
    assert [table.ids for table in workload.row_tables] == [5]
    more = replace(workload, row_tables=(workload.row_tables[0]._replace(ids=500),))
    cluster = load_cluster("ethernet-25")
    settings = PlanSettings(400)
    few, many = (predict(one, cluster, "ps", 4, settings) for one in (workload, more))
    assert many.step_s > few.step_s and few.memory.servers >= held
    found = search(workload, cluster, 4, SearchOptions(settings))
    assert all(one.prediction.strategy.startswith("ps") for one in found.ranked)
