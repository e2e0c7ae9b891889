"""Replicas that are split over workers, under every way to agree: the model of one worker."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.commands.examples.gpt import next_token_loss
from shoal.server.embedding.module import Embedding
from shoal.sync.ddp import CompressedReduce
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests.conftest import World
from tests.models import samples
from tests.products import few_or_all
from tests.server.helpers import launched
from tests.splitting import (
    GPT_OPTIONS,
    assert_close,
    assert_each_goes_on,
    assert_equal,
    gpt,
    mlp,
    normed,
    on_workers,
    refused,
    texts,
    trained,
    workers,
)

PS = [
    *('ps(placement="rank0")', 'ps(placement="rank0", update="worker")'),
    *('ps(placement="workers")', 'ps(placement="workers", update="worker")'),
]
SHARED = "ddp(shared_weights=True)"
PIPELINES = ['pp(2, schedule="zb-h1")', 'pp(2, schedule="interleaved", recompute=True)']
TENSORS = ["tp(2)", "tp(2, sequence=True)"]


@pytest.mark.product(most=5)
@pytest.mark.parametrize(
    "sync",
    [
        *("ddp(bucket_mb=0.0001)", 'gossip(graph="complete")', "zero(1)", "zero(2)", "zero(3)"),
        *(SHARED, "zero(2, shared_weights=True)", *PS),
    ],
)
@pytest.mark.parametrize("split", ["pp(2)", *TENSORS, *PIPELINES, "cp(2)"])
def test_replicas_that_are_split(world: World, split: str, sync: str, whole_suite: bool) -> None:
    strategy = f"{sync} + {split}"
    assert_equal(world, 4, strategy, gpt, texts(22), **GPT_OPTIONS)  # the last batch is short
    if whole_suite and "cp" not in split:
        assert_equal(world, 4, strategy, mlp, samples(28), 12, clip_norm=0.1)


@pytest.mark.product(most=2)
@pytest.mark.parametrize(
    "sync", ["", "ddp + ", f"{SHARED} + ", "zero(1) + ", "zero(3) + ", f"{PS[0]} + "]
)
@pytest.mark.parametrize("tp", TENSORS)
@pytest.mark.parametrize("pp", ["pp(2)", *PIPELINES])
def test_stages_of_layers_that_are_split(
    world: World, pp: str, tp: str, sync: str, whole_suite: bool
) -> None:
    """Micro-batches of 3 and 2 windows of 5: as many positions as no size divides."""
    strategy = f"{sync}{tp} + {pp}"
    assert_equal(world, workers(strategy), strategy, gpt, texts(22, 5), 11, **GPT_OPTIONS)
    if whole_suite:
        assert_equal(world, workers(strategy), strategy, mlp, samples(28), 12, clip_norm=0.1)


@pytest.mark.whole
@pytest.mark.product
@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("split", ['pp(2, schedule="zb-h1")', "tp(2)"])
def test_servers_that_all_parts_share(
    world: World, monkeypatch: pytest.MonkeyPatch, split: str, tcp: bool
) -> None:
    """Each of two servers has a slice of every stage, some of it cut by rows."""
    with launched(monkeypatch, 2, tcp) as servers:
        strategy = f"ps(servers=2) + {split}"
        assert_equal(world, 4, strategy, gpt, texts(16), **GPT_OPTIONS)
        assert all(server.wait_idle(60) for server in servers)


@pytest.mark.whole
@pytest.mark.parametrize("split", ["pp(2)", "tp(2)", 'pp(2, schedule="zb-h1")'])
def test_sharded_parts_hold_their_shard_and_the_blocks_in_use(world: World, split: str) -> None:
    whole_bytes = sum(p.nbytes for p in gpt(8).parameters())

    def body(job: Job, step: Step) -> None:
        flat = step.flat
        peak = 0
        wait = flat.unit_gather._wait

        def resident_bytes() -> int:
            return flat.shard_data.nbytes + sum(memory.nbytes for memory in flat.gathered())

        def noting(*args: Any) -> None:
            nonlocal peak
            wait(*args)
            peak = max(peak, resident_bytes())

        batches = job.batches(texts(16), 8)
        step(next(batches))  # on the first batch the stages are compared with the model
        flat.unit_gather._wait = noting
        step(next(batches))
        stage_bytes = flat.size * flat.shard_data.element_size()
        shard_bytes = flat.shard_data.nbytes
        assert stage_bytes < 0.65 * whole_bytes
        assert 0.4 * stage_bytes < shard_bytes == resident_bytes() < 0.6 * stage_bytes
        assert shard_bytes < peak < 0.8 * stage_bytes

    on_workers(world, f"zero(3) + {split}", partial(gpt, 8), body, **GPT_OPTIONS)


@pytest.mark.parametrize(
    "chain",
    [
        ["ddp + pp(2)", "zero(3) + tp(2)", "zero(2) + pp(2)", 'ps(placement="workers")'],
        ["tp(2)", "ddp", "tp(2) + pp(2)", "zero(1) + tp(2)", "tp(4)"],
        ["single", "zero(1) + pp(2)", PIPELINES[1], "zero(3)", PIPELINES[0]],
        [f"{SHARED} + pp(2)", "zero(1, shared_weights=True)", f"{SHARED} + tp(2)", "single"],
        *few_or_all(
            [],
            [
                ["single", 'ps(placement="rank0") + pp(2)', "zero(3) + tp(2)", "single"],
                ["zero(3) + pp(2)", 'ps(placement="workers") + tp(2)', "tp(2) + pp(2)"],
                ["ddp", 'ps(placement="rank0", update="worker") + pp(2)', "zero(3)", "pp(2)"],
                [f'ps(quorum=1, placement="rank0"){s}' for s in (" + pp(2)", " + tp(2)", "")],
                ["ddp + tp(2)", 'ps(quorum=1, placement="workers") + pp(2)', "ddp"],
            ],
        ),
    ],
    ids=lambda chain: chain[0],
)
def test_each_goes_on_from_what_another_has_saved(
    world: World, tmp_path: Path, chain: list[str]
) -> None:
    assert_each_goes_on(world, tmp_path, chain, partial(gpt, 2), texts(80), **GPT_OPTIONS)


PARTLY = [
    'ddp(compress="int8")',
    'ddp(compress="topk(0.2)")',
    'ddp(compress="powersgd(rank=2)")',
    'ps(compress="int8", placement="rank0")',
    'ps(compress="topk(0.2)", placement="workers", update="worker")',
    'ps(compress="powersgd(rank=2)", placement="rank0")',
    'ps(mode="async", compress="int8", placement="rank0")',
    'ps(quorum=1, compress="topk(0.2)", placement="workers")',
    "localsgd(every=3)",
    'localsgd(every=2, outer="nesterov(lr=0.7)", compress="int8")',
]


@pytest.mark.whole
@pytest.mark.product
@pytest.mark.parametrize("split", ["pp(2)", "tp(2)"])
@pytest.mark.parametrize("sync", PARTLY)
def test_copies_of_a_parameter_stay_equal(world: World, sync: str, split: str) -> None:
    """Embedding and head are one parameter on two stages; norms are whole on two workers."""

    def body(job: Job, step: Step) -> tuple[dict[str, Tensor], float]:
        losses = [float(step(batch)) for batch in job.batches(texts(32), 8, epochs=3)]
        assert losses[-1] < losses[0] - 0.1
        return {name: p.detach().clone() for name, p in step.shard.named}, losses[-1]

    found = on_workers(world, f"{sync} + {split}", partial(gpt, 2), body, **GPT_OPTIONS)
    assert found[0][1] == found[1][1]  # one replica, one loss
    for (first, _), (second, _) in ((found[0], found[1]), (found[2], found[3])):
        copies = [n for n in set(first) & set(second) if split == "pp(2)" or "norm" in n]
        assert len(copies) >= 1
        for name in copies:
            assert torch.equal(first[name], second[name]), name


@pytest.mark.product
@pytest.mark.parametrize("split", ["pp(2)", "tp(2)"])
@pytest.mark.parametrize(
    "sync",
    [
        'ddp(compress="topk(0.2)")',
        'ps(compress="topk(0.2)", placement="rank0", update="worker")',
        *few_or_all(
            [],
            [
                *('ddp(compress="int8")', 'ps(compress="int8", placement="workers")'),
                'ps(quorum=1, compress="topk(0.2)", placement="rank0")',
            ],
        ),
    ],
)
def test_a_continued_run_is_the_run_without_a_break(
    world: World, tmp_path: Path, sync: str, split: str
) -> None:
    run = partial(trained, world, f"{sync} + {split}", partial(gpt, 2), texts(64), **GPT_OPTIONS)
    straight = run(6)
    run(3, save=tmp_path)
    continued = run(6, load=tmp_path)
    for name, tensor in straight.items():
        assert torch.equal(continued[name], tensor), name


@pytest.mark.whole
@pytest.mark.parametrize("outer", ["", ', outer="nesterov(lr=0.7)"'])
def test_an_agreement_is_saved_for_any_cut(world: World, tmp_path: Path, outer: str) -> None:
    """Saved between two agreements; whole or split, replicas go on from it alike."""

    def run(split: str, steps: int = 9, **path: Path) -> dict[str, Tensor]:
        options = {**GPT_OPTIONS, "accumulate": 4, "size": 4 if split else 2, **path}
        strategy = f"localsgd(every=3{outer}){split}"
        return trained(world, strategy, partial(gpt, 2), texts(96), steps, **options)

    run(" + pp(2)", 4, save=tmp_path)
    found = run("", load=tmp_path)
    for split in (" + pp(2)", " + tp(2)"):
        assert_close(found, run(split, load=tmp_path))


@pytest.mark.whole
@pytest.mark.parametrize(
    "sync", ["ddp(", 'ps(placement="rank0", ', 'ps(staleness=2, placement="workers", ']
)
def test_what_is_left_to_send_moves_to_another_cut(world: World, tmp_path: Path, sync: str) -> None:
    def residual(job: Job, step: Step, load: bool) -> dict[str, Tensor]:
        """The sum of what both replicas have still to send, by parameter, of this part."""
        if load:
            job.load(tmp_path)
        else:
            for batch in job.batches(texts(32), 8):
                step(batch)
            job.save(tmp_path)
        has_sums = isinstance(step.sync, CompressedReduce)
        total = (step.sync.sums if has_sums else step.sync.push).residual.clone()
        step.mesh.dp.all_reduce(total).wait()
        named = {n: step.flat.view(i, total, 0) for i, (n, _) in enumerate(step.flat.named)}
        return step.shard.gather_full(named)

    def run(split: str, load: bool) -> list[dict[str, Tensor]]:
        strategy = f'{sync}compress="topk(0.1)"){split}'
        body = partial(residual, load=load)
        return on_workers(world, strategy, partial(gpt, 2), body, **GPT_OPTIONS)

    stages = run(" + pp(2)", load=False)[:2]
    for split in (" + tp(2)", "", " + pp(2)"):
        for name, tensor in run(split, load=True)[0].items():
            expected = next(stage[name] for stage in stages if name in stage)
            assert expected.abs().sum() > 0
            torch.testing.assert_close(tensor, expected)


def _metrics(out: Tensor, y: Tensor) -> dict[str, Any]:
    right = (out.argmax(-1) == y).float().mean()
    return {"loss": next_token_loss(out, y), "right": right, "first": out[:, 0, 0].mean()}


@pytest.mark.parametrize(
    "strategy",
    [
        *("pp(2)", 'pp(2, schedule="bfs")', *TENSORS, "tp(2) + pp(2)", "cp(2)"),
        *('ps(placement="rank0") + pp(2)', "zero(3) + tp(2)", 'gossip(graph="complete") + pp(2)'),
        *("localsgd(every=2) + pp(2)", "localsgd(every=2) + tp(2)"),
    ],
)
def test_evaluating_between_steps(world: World, strategy: str) -> None:
    def body(job: Job, step: Step) -> list[Any]:
        found = []
        for batch in job.batches(texts(16), 8):
            step(batch)
            found.append(job.evaluate(_metrics, texts(11), batch_size=4))
            assert step.model.training
        return found

    alone = "localsgd(every=2)" if "localsgd" in strategy else "single"
    expected, found = (
        on_workers(world, s, partial(gpt, 2), body, loss=next_token_loss, accumulate=4)
        for s in (alone, strategy)
    )
    for of_worker in found:
        for metrics, single in zip(of_worker, expected[0], strict=True):
            assert metrics == pytest.approx(single, abs=1e-4)


def test_batchnorm_in_stages_that_train_alone(world: World) -> None:
    """Whole or in stages, replicas see the same samples."""
    together, split = (
        trained(world, f"localsgd(every=2){split}", normed, samples(64), None, accumulate=2)
        for split in ("", " + pp(2)")
    )
    assert_close(split, together)


def test_rows_on_servers_are_refused_in_a_split_model(world: World) -> None:
    def make() -> nn.Module:
        return nn.Sequential(Embedding(10, 4), mlp())

    plain = partial(torch.optim.SGD, lr=0.1)
    said = refused(world, 2, 'ps(placement="rank0") + pp(2)', make, optimizer=plain)
    assert "shoal.Embedding is not built for a model that is split" in said
