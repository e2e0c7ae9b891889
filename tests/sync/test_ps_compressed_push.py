"""Compressed pushes: bytes as promised, nothing lost, and every rule of the server still holds."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor
from torch.nn import functional as F

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.comm.members.elastic_sum import ElasticSum
from shoal.compress.catalog import BLOCK
from shoal.errors import ShoalError
from shoal.protocol import FrameKind
from shoal.server.client.route import Request
from shoal.server.consistency import Rule
from shoal.server.model.compression import PushCompression
from shoal.server.shared_memory import bytes_of
from shoal.sync.ps.push import CompressedPush
from shoal.sync.ps.worker import PsWorker
from shoal.train.checkpoints.files import read
from shoal.train.step.run_services import RunServices
from shoal.train.step.step import Step
from tests.conftest import World
from tests.models import mlp, samples
from tests.products import few_or_all
from tests.server.helpers import client_of, launched, servers
from tests.sync.compressing import (
    METHODS,
    assert_continued_alike,
    assert_same_bits_and_learning,
    large,
    run,
    signs,
    start,
)


def packed_of(step: Step) -> CompressedPush:
    assert isinstance(step.sync, PsWorker) and isinstance(step.sync.push, CompressedPush)
    return step.sync.push


# ---- learning -----------------------------------------------------------------------------------


@pytest.mark.product
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "options",
    ['placement="rank0"', 'placement="workers"', 'update="worker", placement="rank0"'],
)
def test_workers_hold_the_same_bits_and_learn(world: World, method: str, options: str) -> None:
    assert_same_bits_and_learning(world, f'ps(compress="{method}", {options})')


@pytest.mark.whole
@pytest.mark.product
@pytest.mark.parametrize("method", few_or_all(METHODS[::2], METHODS))
@pytest.mark.parametrize("rule", ["quorum=0.6", "staleness=2", 'mode="async"'])
def test_relaxed_rules_learn(world: World, rule: str, method: str) -> None:
    models = [mlp() for _ in range(3)]
    text = f'ps({rule}, placement="workers", compress="{method}")'
    plain = partial(torch.optim.SGD, lr=0.2)

    def body(group: Group) -> tuple[Any, Any]:
        job, step = start(group, text, models[group.rank], optimizer=plain)
        before = job.evaluate(F.cross_entropy, signs())
        for batch in job.batches(signs(), 22, epochs=30):
            step(batch)
        after = job.evaluate(F.cross_entropy, signs())
        job.close()
        return before, after

    for before, after in world(3, body):
        assert after < 0.5 * before


# ---- bytes --------------------------------------------------------------------------------------


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("method", "least", "most"),
    [
        ("fp16", 1.97, 2.01),
        ("bf16", 1.97, 2.01),
        ("int8", 3.8, 4.0),
        ("onebit", 27.0, 32.0),
        ("topk(0.01)", 70.0, 100.0),
        ("powersgd(rank=4)", 12.0, 14.0),
    ],
)
def test_bytes_against_full_precision(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    least: float,
    most: float,
    count: int,
    tcp: bool,
) -> None:
    """What the sockets have carried, frames and heads with it, once training has started."""
    models = [large() for _ in range(2)]

    def body(group: Group, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
        job, step = start(group, text, models[group.rank])
        before = step.sync.report()
        for batch in job.batches(samples(30), 10):
            step(batch)
        after = step.sync.report()
        job.close()
        return before, after

    def sent(text: str) -> int:
        before, after = world(2, lambda g: body(g, text))[1]
        number: int = after["bytes_sent"] - before["bytes_sent"]
        return number

    with launched(monkeypatch, count, tcp):
        full = sent(f"ps(servers={count})")
    with launched(monkeypatch, count, tcp):
        compressed = sent(f'ps(servers={count}, compress="{method}")')
    # two servers get twice the frames and heads, which this model is small beside
    assert least * (1 - 0.2 * (count - 1)) <= full / compressed <= most


# ---- error feedback and checkpoints -------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_what_was_sent_and_what_is_left_make_up_all_gradients(method: str) -> None:
    with servers(2) as found:
        client = client_of(found, 0, Rule(1), compress=method)
        specs = client.specs
        client.leave()
        client.close()
    for spec in specs:
        packing = PushCompression(spec)
        there = torch.zeros(spec.stop - spec.start)
        residual, given, arrived = (torch.zeros_like(there) for _ in range(3))
        held = torch.zeros_like(there, dtype=torch.bool)
        for cut in spec.slices:
            at = cut.start - spec.start
            held[at : at + torch.Size(cut.shape).numel()] = True
        for seed in range(10):
            gradient = torch.randn(packing.size, generator=torch.Generator().manual_seed(seed))
            gradient[~held] = 0.0
            given += gradient
            packing.unpack(packing.pack(gradient, residual), there)
            arrived += there
        torch.testing.assert_close(arrived + residual, given, atol=1e-4, rtol=0)


def test_a_push_that_is_dropped_takes_nothing_of_earlier_steps_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = 'ps(quorum=1, placement="rank0", compress="topk(0.05)")'
    job, step = start(solo_group(), text, mlp())
    assert isinstance(step.sync, PsWorker)
    packed = packed_of(step)
    client = step.sync.client
    batches = iter(job.batches(samples(40), 10))
    step(next(batches))
    before = packed.residual.clone()
    commit = client.commit
    monkeypatch.setattr(
        client, "commit", lambda *push: structs.replace(commit(*push), verdict="dropped")
    )
    step(next(batches))
    assert before.abs().sum() > 0 and torch.equal(packed.residual, before)
    monkeypatch.undo()
    step(next(batches))
    assert not torch.equal(packed.residual, before)
    job.close()


@pytest.mark.product
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("update", ["server", "worker"])
def test_a_continued_run_has_the_same_bits(
    world: World, tmp_path: Path, method: str, update: str
) -> None:
    text = f'ps(compress="{method}", placement="workers", update="{update}")'
    assert_continued_alike(world, text, tmp_path)


@pytest.mark.parametrize("rule", ["", ", staleness=2"])
def test_other_workers_share_what_was_left_to_send(world: World, tmp_path: Path, rule: str) -> None:
    models = [mlp() for _ in range(3)]
    text = f'ps(compress="topk(0.05)", placement="rank0"{rule})'
    world(2, lambda g: run(g, models[g.rank], text, tmp_path, save_at=3))
    saved = read(tmp_path).optimizer
    names = [name for name, _ in mlp().named_parameters()]
    residuals = [
        torch.cat([saved[f"sync0/{n}/gradients:worker:{r}:residual"].view(-1) for n in names])
        for r in range(2)
    ]
    assert residuals[0].abs().sum() > 0 and not torch.equal(*residuals)

    def body(group: Group) -> Tensor:
        job, step = start(group, text, models[group.rank])
        job.load(tmp_path)
        found = packed_of(step).residual
        pieces = [step.flat.view(i, found, 0).flatten() for i in range(len(step.flat.params))]
        job.close()
        return torch.cat(pieces)

    torch.testing.assert_close(sum(world(3, body)), residuals[0] + residuals[1])


def test_a_checkpoint_without_the_lost_worker(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    models = [mlp() for _ in range(3)]
    lost: set[int] = set()  # what a launcher notes

    def body(group: Group) -> None:
        text = 'ps(mode="async", compress="topk(0.05)")'
        sums = ElasticSum(tmp_path / "sums", group.rank, lost.__contains__)
        job, step = start(group, text, models[group.rank], RunServices(elastic_sum=sums))
        assert isinstance(step.sync, PsWorker)
        for batch in job.batches(samples(40), 10):
            if group.rank == 1 and step.steps == 2:
                step.sync.client.close()  # as a process that is killed
                lost.add(1)
                return
            step(batch)
        job.save(tmp_path)
        job.close()

    with launched(monkeypatch, 2):
        world(3, body)
    names = {n.rpartition("/")[2] for n in read(tmp_path).optimizer if n.endswith(":residual")}
    assert names == {f"gradients:worker:{r}:residual" for r in (0, 2)}


# ---- what is refused ----------------------------------------------------------------------------


def damaged(method: str) -> tuple[Tensor, Tensor]:
    """A payload that unpacks on the flat model of the helpers, and one that names no element."""
    with servers() as found:
        client = client_of(found, 0, Rule(1), compress=method)
        packing = PushCompression(client.specs[0])
        client.leave()
        client.close()
    good = packing.pack(torch.randn(packing.size), torch.zeros(packing.size))
    bad = good.clone()
    bad[:2] = torch.tensor([packing.size - BLOCK // 2]).short().view(torch.uint8)
    return good, bad


def pushed(packed: Tensor) -> Request:
    return Request(FrameKind.COMPRESSED, payload=(bytes_of(packed),), sequence=1, is_answered=False)


@pytest.mark.parametrize("damage", ["an index", "too short", "too long"])
def test_a_push_that_names_other_elements_is_refused_and_others_go_on(damage: str) -> None:
    from shoal.server.messages import Commit

    good, bad = damaged("topk(0.5)")
    payload = {"an index": bad, "too short": good[:-4], "too long": torch.cat([good, good])}
    rule = Rule(2, asynchronous=True)
    heads = torch.ones(1, 3)
    with servers() as found:
        clients = [client_of(found, rank, rule, compress="topk(0.5)") for rank in range(2)]
        try:
            link = clients[0].links[0]
            link.post("push", pushed(payload[damage]))
            words = "has an index outside" if damage == "an index" else "COMPRESSED, got"
            with pytest.raises(ShoalError, match=words):
                clients[0].commit(Commit(0, 0, 1.0), heads)
            clients[1].links[0].post("push", pushed(good))
            assert clients[1].commit(Commit(0, 0, 1.0), heads).verdict == "admitted"
            clients[1].leave()
        finally:
            for client in clients:
                client.close()


def test_a_commit_without_its_gradients_is_refused() -> None:
    from shoal.server.messages import Commit

    with servers() as found:
        client = client_of(found, 0, Rule(1), compress="int8")
        try:
            with pytest.raises(ShoalError, match="without its gradients"):
                client.commit(Commit(0, 0, 1.0), torch.ones(1, 3))
        finally:
            client.close()


def test_a_method_that_is_none_is_refused_by_the_server() -> None:
    with servers() as found, pytest.raises(ShoalError, match="compress"):
        client_of(found, 0, Rule(1), compress="topk(7)")
