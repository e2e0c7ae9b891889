"""The parameter server under a job: synchronous rules equal one device, others are bounded."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.server.client import started
from shoal.server.client.client import Client
from shoal.strategy.strategy import parse
from shoal.sync.ps import plan
from shoal.sync.ps.worker import PsWorker
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests.conftest import World
from tests.jobs import CPU, after_training
from tests.models import convnet, mlp, samples
from tests.server.helpers import launched
from tests.splitting import assert_close, trained
from tests.sync.test_zero import decayed
from tests.test_equal import ADAMW, SGD, Halting, assert_equal_to_single

# ---- synchronous: the result of one device ------------------------------------------------------


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("update", ["server", "worker"])
@pytest.mark.parametrize(("count", "size"), [(1, 2), (2, 4), (3, 2)])
@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_servers_equal_one_device(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    tcp: bool,
    count: int,
    size: int,
    update: str,
    optimizer: Any,
) -> None:
    strategy = f'ps(servers={count}, update="{update}")'
    options = {"optimizer": optimizer, "clip_norm": 0.1, "accumulate": 2, "lr": falling}
    with launched(monkeypatch, count, tcp):
        assert_equal_to_single(world, size, strategy, mlp, samples(50), 12, **options)


def test_gradients_are_sent_over_tcp_from_where_backward_has_put_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bool] = []
    plain = Client.push

    def push(client: Client, elements: slice, held: Tensor | None = None) -> None:
        is_buffer = held is None or held.untyped_storage().nbytes() == client.out.nbytes
        sent.append(not is_buffer)
        plain(client, elements, held)

    monkeypatch.setattr(Client, "push", push)
    monkeypatch.setattr("shoal.sync.ps.push.LARGE_BYTES", 64)
    with launched(monkeypatch, 2, tcp=True):
        assert_equal_to_single(world, 2, "ps(servers=2)", mlp, samples(50), 12, optimizer=SGD)
    assert any(sent)


def falling(step: int) -> float:
    return 0.01 / (1 + step)


class Unknown(torch.optim.SGD):
    pass


def unknown(named: Any) -> torch.optim.Optimizer:
    return Unknown(named, lr=0.1)


CASES: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "staleness 0": (", staleness=0", convnet, samples(66, (1, 4, 4)), {}),
    "a parameter without gradient": ("", Halting, samples(40), {}),
    "parameter groups": ("", mlp, samples(30), {"optimizer": decayed, "lr": falling}),
    "any optimizer": (', update="worker"', mlp, samples(30), {"optimizer": unknown}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("placement", ["rank0", "workers"])
def test_servers_of_workers_equal_one_device(world: World, placement: str, case: str) -> None:
    rule, make, data, options = CASES[case]
    strategy = f'ps(placement="{placement}"{rule})'
    assert_equal_to_single(world, 3, strategy, make, data, 20, **options)


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "where", "words"),
    [
        (unknown, "cpu", "Unknown is not a class of torch.optim"),
        (partial(torch.optim.SGD, lr=torch.tensor(0.1)), "cpu", "not a plain number"),
        (partial(torch.optim.SparseAdam, lr=0.1), "cpu", "SparseAdam is not a class of torch"),
        pytest.param(
            *(SGD, "cuda", "there is no CUDA here"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_what_servers_cannot_do_is_refused(optimizer: Any, where: str, words: str) -> None:
    job = Job(parse(f'ps(placement="rank0", on="{where}")'), solo_group(), device=CPU)
    with pytest.raises(BadInput, match=words):
        job.step(mlp(), F.cross_entropy, optimizer=optimizer)


# ---- bounded staleness, quorum, async -----------------------------------------------------------


def run(
    group: Group, strategy: str, model: nn.Module, steps: int, each: Any = None
) -> tuple[PsWorker, list[float]]:
    """Learn which of the first three features is the largest."""
    job = Job(parse(strategy), group, device=CPU)
    step = job.step(model, F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.5))
    losses = []
    inputs = samples(24).tensors[0]
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    for batch in job.batches(data, 12, epochs=steps, steps=steps):
        losses.append(float(step(batch)))
        if each is not None:
            each(group.rank, step)
    job.close()
    assert isinstance(step.sync, PsWorker)
    return step.sync, losses


@pytest.mark.product
@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("placement", ["rank0", "workers"])
def test_no_pull_is_ahead_of_the_slowest_by_more_than_the_bound(
    world: World, staleness: int, placement: str
) -> None:
    generator = torch.Generator().manual_seed(staleness)
    pauses = torch.rand(3, 30, generator=generator) * 0.01 * torch.tensor([[1.0], [3], [0.1]])
    models = [mlp() for _ in range(3)]
    for model, pause_s in zip(models, map(iter, pauses.tolist()), strict=True):
        model.register_forward_pre_hook(lambda *_, pause_s=pause_s: time.sleep(next(pause_s)))
    strategy = f'ps(staleness={staleness}, placement="{placement}")'
    found = world(3, lambda g: run(g, strategy, models[g.rank], 30)[0])
    clocks = [(step, slowest) for sync in found for step, slowest in sync.pulls]
    assert len(clocks) >= 3 * 29
    assert max(step - slowest for step, slowest in clocks) <= staleness
    assert max(step - slowest for step, slowest in clocks) > 0, "the delays made some run ahead"
    report = found[0].report()["servers"][0]
    assert all(int(ahead) <= staleness for ahead in report["steps_ahead"])
    assert sum(w["admitted"] for w in report["workers"].values()) == 90


@pytest.mark.parametrize("late", ["drop", "fold"])
@pytest.mark.parametrize("placement", ["rank0", "workers"])
def test_a_quorum_goes_on_without_the_slow_worker(world: World, late: str, placement: str) -> None:
    """Worker 2 starts its first step and finishes it only when the others have done eight."""
    ahead = threading.Event()
    models = [mlp(), mlp(), mlp()]
    models[2].register_forward_pre_hook(lambda *_: ahead.wait(60) and None)
    strategy = f'ps(quorum=0.6, late="{late}", placement="{placement}")'

    def each(rank: int, step: Step) -> None:
        if rank == 0 and step.steps == 8:
            ahead.set()

    found = world(3, lambda g: run(g, strategy, models[g.rank], 20, each)[0])
    workers = found[0].report()["servers"][0]["workers"]
    kept, other = ("folded", "dropped") if late == "fold" else ("dropped", "folded")
    assert workers["2"][kept] >= 1
    assert sum(w[other] for w in workers.values()) == 0
    assert found[2].skipped >= 6
    for rank, sync in enumerate(found):
        pushed = sum(workers[str(rank)].values())
        assert pushed + sync.skipped == 20
    assert any("dropped as late" in sentence for sentence in found[0].summary())


def test_a_quorum_may_be_a_count_and_the_start_says_what_it_leaves(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [mlp(), mlp(), mlp()]
    found = world(3, lambda g: run(g, 'ps(quorum=2, placement="rank0")', models[g.rank], 4))
    assert found[0][0].context.rule.quorum == 2
    said = "quorum 2 of 3 workers: each step leaves behind up to 1 straggler"
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.parametrize("rule", ["quorum=1", "staleness=2", 'mode="async"'])
def test_one_worker_under_any_rule_equals_one_device(world: World, rule: str) -> None:
    """Its weights hold its own latest push."""
    assert_equal_to_single(world, 1, f'ps({rule}, placement="rank0")', mlp, samples(50), 12)


@pytest.mark.parametrize(("tcp", "missed"), [(False, {"0"}), (True, {"0", "1"})])
def test_over_a_network_the_next_weights_come_while_a_step_computes(
    world: World, monkeypatch: pytest.MonkeyPatch, tcp: bool, missed: set[str]
) -> None:
    """So they may lack the push of that step; in shared memory they do not."""
    with launched(monkeypatch, 1, tcp):
        (sync,) = world(1, lambda g: run(g, "ps(staleness=2)", mlp(), 30)[0])
    assert set(sync.report()["servers"][0]["missed_updates"]) == missed


# ---- checkpoints --------------------------------------------------------------------------------


@pytest.mark.product
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('ps(placement="workers")', "ddp"),
        ("ddp", 'ps(placement="workers")'),
        ('ps(placement="rank0")', 'ps(placement="workers", update="worker")'),
        ('ps(quorum=1, placement="workers")', "ddp"),
    ],
)
def test_a_checkpoint_goes_on_under_another_strategy(
    world: World, tmp_path: Path, first: str, second: str, optimizer: Any
) -> None:
    after = partial(trained, world, make=mlp, data=samples(64), optimizer=optimizer)
    after(first, steps=4, save=tmp_path / "saved", size=2)
    resumed = after(second, steps=8, load=tmp_path / "saved", size=3)
    assert_close(resumed, after("single", steps=8))


def test_evaluation_sees_the_weights_of_the_servers(world: World) -> None:
    def look(job: Job, step: Step, losses: Any) -> tuple[float, Tensor]:
        assert not step.update.optimizer.state, "it is on the servers"
        return job.evaluate(F.cross_entropy, samples(30)), step.flat.data.clone()

    strategy = 'ps(mode="async", placement="rank0")'
    first, *others = after_training(world, 3, strategy, look, data=samples(60), batch_size=12)
    for value, data in others:
        assert value == first[0]
        assert torch.equal(data, first[1])


# ---- on a device: here the CPU stands in, whose memory is not shared with workers


@pytest.mark.parametrize("placement", ["rank0", "workers"])
def test_servers_on_a_device_equal_one_device(
    world: World, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    for module in (plan, started):
        monkeypatch.setattr(module, "device_of_server", lambda term: CPU)
    strategy = f'ps(placement="{placement}", on="cuda")'
    options = {"optimizer": ADAMW, "clip_norm": 0.1}
    assert_equal_to_single(world, 2, strategy, mlp, samples(50), 12, **options)


def test_server_processes_have_no_gpu_of_a_worker() -> None:
    with pytest.raises(BadInput, match='add placement="rank0"'):
        parse('ps(on="cuda")').layout(2)
