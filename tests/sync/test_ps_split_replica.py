"""Relaxed rules of ps with tp and pp: one decision for all shards of a replica."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.server.consistency import LedgerState
from shoal.server.messages import PushDecided
from shoal.server.model.served_model import ServedModel
from shoal.server.model.snapshot import copied
from shoal.server.process.server import Server
from shoal.sync.ps.consistency import RelaxedPs
from shoal.sync.ps.worker import PsWorker
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests.conftest import World
from tests.models import mlp, samples
from tests.server.helpers import launched
from tests.splitting import assert_close, assert_equal, gpt, job_of, texts, trained
from tests.test_hybrids import GPT_OPTIONS

SPLITS = ["pp(2)", "tp(2)"]


def sync_of(step: Step) -> RelaxedPs:
    assert isinstance(step.sync, RelaxedPs)
    return step.sync


def held_by(servers: list[Server]) -> list[ServedModel]:
    """What all servers hold of all shards; that of the leader comes first."""
    models = [model for server in servers for model in server.models.values()]
    return sorted(models, key=lambda model: model.spec.index)


# ---- where nothing is left out: the model of one worker -----------------------------------------


@pytest.mark.product(pairs=True, most=4)
@pytest.mark.parametrize("rule", ["staleness=0", "quorum=1"])
@pytest.mark.parametrize("where", ['placement="rank0"', 'placement="workers"', "servers=2", "tcp"])
@pytest.mark.parametrize("split", SPLITS)
def test_where_all_workers_count_it_equals_one_device(
    world: World, monkeypatch: pytest.MonkeyPatch, split: str, where: str, rule: str
) -> None:
    """Clipped by the norm of the whole: what several parts hold counts once."""
    strategy = f"ps({rule}, {where.replace('tcp', 'servers=2')}) + {split}"
    with launched(monkeypatch, 2, tcp=where == "tcp") as servers:
        if rule == "staleness=0":
            assert_equal(world, 4, strategy, gpt, texts(22), **GPT_OPTIONS)
        else:
            assert_close(in_the_end(world, 4, strategy), in_the_end(world, 1, "single"))
        assert all(server.wait_idle(60) for server in servers)


def in_the_end(world: World, size: int, strategy: str) -> dict[str, Tensor]:
    return trained(world, strategy, gpt, texts(22), None, size=size, **GPT_OPTIONS)


@pytest.mark.product
@pytest.mark.parametrize("rule", ["quorum=1", "staleness=2", 'mode="async"'])
@pytest.mark.parametrize("split", [*SPLITS, 'pp(2, schedule="zb-h1")', "tp(2) + pp(2)"])
def test_one_replica_under_any_rule_equals_one_device(world: World, split: str, rule: str) -> None:
    size = 4 if "+" in split else 2
    strategy = f'ps({rule}, placement="rank0") + {split}'
    assert_equal(world, size, strategy, gpt, texts(22), **GPT_OPTIONS)


# ---- quorum -------------------------------------------------------------------------------------


@pytest.mark.product
@pytest.mark.parametrize("late", ["drop", "fold"])
@pytest.mark.parametrize("split", SPLITS)
def test_what_is_late_is_late_in_every_part(
    world: World, monkeypatch: pytest.MonkeyPatch, split: str, late: str
) -> None:
    """Replica 1 makes its first push when the others have done eight steps."""
    ahead = threading.Event()
    models = list[ServedModel]()

    def before(job: Job, step: Step) -> None:
        if job.rank == 0 and step.steps == 8:
            models.extend(held_by(servers))
            ahead.set()
        if job.replica == 1 and step.steps == 0:
            assert ahead.wait(60)

    def body(group: Group) -> RelaxedPs:
        sgd = partial(torch.optim.SGD, lr=0.3)
        strategy = f'ps(quorum=0.3, late="{late}", servers=2) + {split}'
        with job_of(group, strategy, mlps[group.rank], optimizer=sgd) as (job, step):
            for batch in job.batches(samples(24), 12, epochs=20, steps=20):
                before(job, step)
                step(batch)
            job.barrier()
        return sync_of(step)

    mlps = [mlp() for _ in range(6)]
    with launched(monkeypatch, 2) as servers:
        found = world(6, body)
        leader, *followers = models
        assert len(followers) == 3
        entries = leader.log.entries_after(0)
        for model in followers:
            with model.lock:
                model.lock.wait_for(lambda m=model: m.log.position == leader.log.position, 30)
            assert model.log.entries_after(0) == entries
            ledgers = [copied(LedgerState, m.state.ledger) for m in (model, leader)]
            assert ledgers[0] == ledgers[1]
    pushes = [entry.decision for entry in entries if isinstance(entry.decision, PushDecided)]
    verdicts = [push.verdict for push in pushes if push.worker == 1]
    assert verdicts[0] == ("dropped" if late == "drop" else "folded")
    stats = found[0].report()["servers"][0]["workers"]
    assert stats["1"]["dropped" if late == "drop" else "folded"] >= 1
    skipped = [sync.skipped for sync in found]
    for replica in range(3):
        first, second = skipped[2 * replica : 2 * replica + 2]
        assert first == second == 20 - sum(stats[str(replica)].values())
    assert skipped[2] >= 6
    assert any("replica 1: " in line and "late" in line for line in found[0].summary())


# ---- copies -------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("split", SPLITS)
def test_copies_are_equal_in_a_step_whose_parts_have_different_versions(
    world: World, split: str
) -> None:
    """Rank 1 pulls when the other replica has gone on since rank 0 did."""
    has_pulled = threading.Event()
    has_gone_on = threading.Event()
    models = [gpt(2) for _ in range(4)]

    def late_pull(pull: Any, *request: Any) -> Any:
        has_pulled.set()
        assert has_gone_on.wait(60)
        return pull(*request)

    def body(group: Group) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        used = []
        pulled = []
        strategy = f'ps(mode="async", placement="rank0") + {split}'
        with job_of(group, strategy, models[group.rank], **GPT_OPTIONS) as (job, step):
            client = sync_of(step).client
            for batch in job.batches(texts(64), 8):
                if job.replica == 1 and step.steps == 3:
                    assert has_pulled.wait(60)
                if group.rank == 1 and step.steps == 3:
                    client.pull = partial(late_pull, client.pull)
                step(batch)
                if job.replica == 1 and step.steps == 5:
                    has_gone_on.set()
                used.append({n: p.detach().clone() for n, p in step.shard.named})
                views = [step.flat.view(i, client.inbox, 0).clone() for i in range(len(used[-1]))]
                pulled.append(dict(zip(used[-1], views, strict=True)))
        return used, pulled

    found = world(4, body)
    both = set(found[0][0][0]) & set(found[1][0][0])
    copies = [n for n in both if split == "pp(2)" or "norm" in n]
    assert copies
    for first, second in ((0, 1), (2, 3)):
        for mine, other in zip(found[first][0], found[second][0], strict=True):
            for name in copies:
                assert torch.equal(mine[name], other[name]), name
    used = found[1][0][3]
    pulled = found[1][1][3]
    assert any(not torch.equal(used[name], pulled[name]) for name in copies), "versions differed"


@pytest.mark.parametrize("split", SPLITS)
def test_one_norm_clips_all_parts_where_pushes_are_compressed(
    world: World, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    """The servers of both parts have different gradients of what both hold."""
    norms: dict[int, list[float]] = {0: [], 1: []}
    models = [gpt(2) for _ in range(2)]

    def body(group: Group) -> None:
        strategy = f'ps(compress="topk(0.1)", placement="rank0") + {split}'
        with job_of(group, strategy, models[group.rank], **GPT_OPTIONS) as (job, step):
            assert isinstance(step.sync, PsWorker)
            client = step.sync.client
            set_norm = client.set_norm

            def noting(value: float) -> None:
                norms[group.rank].append(value)
                set_norm(value)

            monkeypatch.setattr(client, "set_norm", noting)
            for batch in job.batches(texts(32), 8):
                step(batch)

    world(2, body)
    assert len(norms[0]) == 4 and norms[0] == norms[1]
