"""Compressed gradients: nothing is lost, workers stay the same, bytes are as promised."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.comm.compress import BLOCK
from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.errors import ShoalError
from shoal.replica.flat_params import FlatParams
from shoal.server.client.route import Request
from shoal.server.consistency import Rule
from shoal.server.messages import Commit
from shoal.server.model.compression import PushCompression
from shoal.server.protocol import FrameKind
from shoal.server.shared_memory import bytes_of
from shoal.strategy.strategy import parse
from shoal.sync.compressed_sum import ShardedSum, make_compressed_sum
from shoal.sync.ps.push import CompressedPush
from shoal.sync.ps.worker import PsWorker
from shoal.train.checkpoints.files import read
from shoal.train.job import Job
from shoal.train.step.step import Step
from tests.conftest import World
from tests.jobs import CPU, after_training
from tests.models import Partly, mlp, samples
from tests.products import few_or_all
from tests.server.helpers import client_of, launched, servers

METHODS = ["fp16", "bf16", "int8", "int4", "onebit", "topk(0.05)", "powersgd(rank=2)"]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
PLAIN = partial(torch.optim.SGD, lr=0.1)
# of `large` (linear 6x256, 256x180, 180x3 and their biases) at rank 4, or as they are where that
# is less
POWERSGD_FLOATS = 4 * (6 + 256) + 256 + 4 * (256 + 180) + 180 + 3 * 180 + 3


def large() -> nn.Module:
    """48,640 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 256), nn.Tanh(), nn.Linear(256, 180), nn.Linear(180, 3))


def signs() -> TensorDataset:
    """What can be learnt: whether the first feature is positive."""
    x = samples(44).tensors[0]
    return TensorDataset(x, (x[:, 0] > 0).long())


def start(group: Group, text: str, model: nn.Module, optimizer: Any = SGD) -> tuple[Job, Step]:
    job = Job(parse(text), group, device=CPU, seed=3)
    return job, job.step(model, F.cross_entropy, optimizer=optimizer)


# ---- nothing is lost ----------------------------------------------------------------------------


@pytest.mark.product
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_what_was_summed_and_what_is_left_make_up_all_gradients(
    world: World, method: str, size: int
) -> None:
    """Over ten steps, in two slices of lengths that the ranks do not divide."""
    models = [mlp() for _ in range(size)]

    def body(group: Group) -> tuple[Tensor, Tensor, Tensor]:
        flat = FlatParams(models[group.rank].named_parameters())
        cut = flat.ranges[2].start
        slices = [slice(cut, flat.size), slice(flat.offset, cut)]
        sums = make_compressed_sum(method, flat, group, slices)
        generator = torch.Generator().manual_seed(group.rank)
        given, arrived = (torch.zeros(flat.size) for _ in range(2))
        for _ in range(10):
            x = torch.randn(flat.size, generator=generator)
            x[flat.gaps()] = 0.0
            x[: flat.offset] = 0.0
            given += x
            for at in slices:
                sums.start(x[at], at)
            sums.finish()
            arrived += x
        left = sums.residual.clone()
        if isinstance(sums, ShardedSum):
            for begin, owned in sums.owned.items():
                left[owned] += sums.owed[begin]
        return given, arrived, left

    found = world(size, body)
    for _, arrived, _ in found:
        assert torch.equal(arrived, found[0][1])
    given = torch.stack([g for g, _, _ in found]).sum(0)
    left = torch.stack([r for _, _, r in found]).sum(0)
    torch.testing.assert_close(found[0][1] + left, given, atol=1e-3, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_what_was_pushed_and_what_is_left_make_up_all_gradients(method: str) -> None:
    with servers(2) as found:
        specs = client_of(found, 0, Rule(1), compress=method).specs
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
    assert isinstance(step.sync, PsWorker) and isinstance(step.sync.push, CompressedPush)
    packed = step.sync.push
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


# ---- learning -----------------------------------------------------------------------------------


@pytest.mark.product
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "strategy",
    [
        *("ddp(bucket_mb=25", "ddp(bucket_mb=0.0001", "localsgd(every=2"),
        *(
            'ps(placement="rank0"',
            'ps(placement="workers"',
            'ps(placement="rank0", update="worker"',
        ),
    ],
)
def test_workers_hold_the_same_bits_and_learn(world: World, method: str, strategy: str) -> None:
    """All know the loss of all in every step, with localsgd at averages."""
    is_local = strategy.startswith("localsgd")

    def look(job: Job, step: Step, losses: list[float]) -> tuple[list[float], Tensor]:
        if is_local:
            report = step.sync.report()
            assert report["bytes_per_step"] < 0.35 * report["ddp_bytes_per_step"]
        return losses[1::2] if is_local else losses, step.flat.data[step.flat.offset :].clone()

    text = f'{strategy}, compress="{method}")'
    options: Any = {"data": signs(), "batch_size": 11, "epochs": 10, "optimizer": SGD}
    found = after_training(world, 3, text, look, **options)
    for losses, data in found:
        assert losses == found[0][0]
        assert torch.equal(data, found[0][1])
    assert sum(found[0][0][-4:]) < (0.7 if is_local else 0.5) * sum(found[0][0][:4])


@pytest.mark.whole
@pytest.mark.product
@pytest.mark.parametrize("method", few_or_all(METHODS[::2], METHODS))
@pytest.mark.parametrize("rule", ["quorum=0.6", "staleness=2", 'mode="async"'])
def test_relaxed_rules_learn(world: World, rule: str, method: str) -> None:
    def look(job: Job, step: Step, losses: Any) -> float:
        value: float = job.evaluate(F.cross_entropy, signs())
        return value

    text = f'ps({rule}, placement="workers", compress="{method}")'
    options: Any = {"data": signs(), "batch_size": 22, "optimizer": partial(PLAIN, lr=0.2)}
    before, after = (
        after_training(world, 3, text, look, epochs=30, steps=steps, **options)
        for steps in (1, None)
    )
    assert max(after) < 0.5 * min(before)


@pytest.mark.parametrize("strategy", ['ddp(compress="onebit")', "localsgd(every=3)"])
def test_a_parameter_without_a_gradient_keeps_its_bits(world: World, strategy: str) -> None:
    def look(job: Job, step: Any, losses: Any) -> Any:
        return step.model

    model, _ = after_training(world, 2, strategy, look, make=Partly)
    assert torch.equal(model.unused.weight, Partly().unused.weight)
    assert not torch.equal(model.used.weight, Partly().used.weight)


# ---- bytes --------------------------------------------------------------------------------------


def reports(world: World, size: int, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the last worker, before and after three steps."""
    models = [large() for _ in range(size)]

    def body(group: Group) -> tuple[dict[str, Any], dict[str, Any]]:
        job, step = start(group, text, models[group.rank])
        before = step.sync.report()
        for batch in job.batches(samples(48), 16):
            step(batch)
        after = step.sync.report()
        assert "bf16" not in text or "ps" in text or "2.0 times less" in step.sync.summary()[0]
        job.close()
        return before, after

    found: tuple[dict[str, Any], dict[str, Any]] = world(size, body)[-1]
    return found


# how many times fewer bytes than in full precision: under ddp, and under ps with frames and heads
FEWER = {
    "fp16": ((1.99, 2.01), (1.97, 2.01)),
    "bf16": ((1.99, 2.01), (1.97, 2.01)),
    "int8": ((3.85, 4.0), (3.8, 4.0)),
    "int4": ((7.4, 7.6), (7.2, 7.6)),
    "onebit": ((29.5, 32.0), (27.0, 32.0)),
    "topk(0.01)": ((38.0, 67.0), (70.0, 100.0)),
    "powersgd(rank=4)": ((12.0, 14.0), (12.0, 14.0)),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", FEWER)
def test_bytes_of_ddp_against_full_precision(world: World, size: int, method: str) -> None:
    least, most = FEWER[method][0]
    _, compressed = reports(world, size, f'ddp(compress="{method}")')
    _, full = reports(world, size, "ddp")
    assert compressed["steps"] == full["steps"] == 3
    assert full["bytes_per_step"] == full["ddp_bytes_per_step"] == compressed["ddp_bytes_per_step"]
    assert least <= full["bytes_sent"] / compressed["bytes_sent"] <= most
    if method.startswith("powersgd"):
        floats = POWERSGD_FLOATS + 7  # the loss and a flag for each parameter
        expected = 2 * 4 * floats * (size - 1) / size
        assert compressed["bytes_per_step"] == pytest.approx(expected, abs=3)


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("method", FEWER)
def test_bytes_of_ps_against_full_precision(
    world: World, monkeypatch: pytest.MonkeyPatch, method: str, count: int, tcp: bool
) -> None:
    """What the sockets have carried once training has started."""
    least, most = FEWER[method][1]
    sent = []
    for compress in ("", f', compress="{method}"'):
        with launched(monkeypatch, count, tcp):
            before, after = reports(world, 2, f"ps(servers={count}{compress})")
        sent.append(after["bytes_sent"] - before["bytes_sent"])
    # two servers get twice the frames and heads, which this model is small beside
    assert least * (1 - 0.2 * (count - 1)) <= sent[0] / sent[1] <= most


@pytest.mark.parametrize(("size", "times"), [(2, 66.7), (4, 40.0), (8, 40.0)])
def test_bytes_of_topk_do_not_grow_with_the_workers(world: World, size: int, times: float) -> None:
    """Each sends 1% of the elements, 4 bytes for each; sums hold up to 4%."""
    data = TensorDataset(torch.randn(32, 400), torch.randint(0, 9, (32,)))

    def look(job: Job, step: Step, losses: Any) -> tuple[dict[str, Any], Tensor]:
        return step.sync.report(), step.flat.data.clone()

    make = partial(nn.Linear, 400, 1000)
    found = after_training(world, size, 'ddp(compress="topk(0.01)")', look, make=make, data=data)
    for report, data_of_rank in found:
        ratio = report["ddp_bytes_per_step"] / report["bytes_per_step"]
        assert ratio == pytest.approx(times, rel=0.02)
        assert torch.equal(data_of_rank, found[0][1])


# ---- checkpoints --------------------------------------------------------------------------------


def run(
    group: Group, text: str, model: nn.Module, path: Path, save: bool, optimizer: Any = SGD
) -> tuple[list[float], Tensor]:
    """Eight steps, saved after the sixth; or the rest of them, continued from there."""
    job, step = start(group, text, model, optimizer)
    if not save:
        job.load(path)
    losses = []
    for batch in job.batches(samples(31), 10, epochs=2):
        losses.append(float(step(batch)))
        if save and job.steps == 6:
            job.save(path)
    data = step.flat.data[step.flat.offset :].clone()
    job.close()
    return losses, data


def assert_continued_alike(
    world: World, text: str, path: Path, size: int = 3, optimizer: Any = SGD
) -> None:
    """A run that goes on from a checkpoint has the same bits as the one that saved it."""
    models = [[mlp(seed) for _ in range(size)] for seed in (0, 9)]
    whole, again = (
        world(size, lambda g, i=i: run(g, text, models[i][g.rank], path, i == 0, optimizer))
        for i in range(2)
    )
    for (losses, data), (losses_again, data_again) in zip(whole, again, strict=True):
        assert losses_again == losses[6:]
        assert torch.equal(data_again, data)


@pytest.mark.product
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "strategy",
    [
        *("ddp(bucket_mb=25", "ddp(bucket_mb=0.0001"),
        *('ps(placement="workers"', 'ps(placement="workers", update="worker"'),
    ],
)
def test_a_continued_run_has_the_same_bits(
    world: World, tmp_path: Path, method: str, strategy: str
) -> None:
    assert_continued_alike(world, f'{strategy}, compress="{method}")', tmp_path)


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("compress", ["", ', compress="topk(0.1)"', ', compress="int8"'])
@pytest.mark.parametrize("outer", ["", ', outer="nesterov(lr=0.7)"', ', outer="adam(lr=0.01)"'])
def test_localsgd_saved_where_replicas_agree_continues_with_the_same_bits(
    world: World, tmp_path: Path, outer: str, compress: str, size: int
) -> None:
    """The inner optimizer remembers nothing here, so nothing is averaged."""
    text = f"localsgd(every=2{outer}{compress})"
    assert_continued_alike(world, text, tmp_path, size, PLAIN)


@pytest.mark.parametrize(
    "text",
    [
        *(f'ddp(compress="{method}")' for method in METHODS),
        'ps(compress="topk(0.05)", placement="rank0")',
        'ps(compress="topk(0.05)", placement="rank0", staleness=2)',
    ],
)
def test_other_workers_share_what_was_left_to_send(world: World, tmp_path: Path, text: str) -> None:
    models = [mlp() for _ in range(3)]
    world(2, lambda g: run(g, text, models[g.rank], tmp_path / "2", save=True))

    def load(group: Group) -> None:
        job, _ = start(group, text, models[group.rank])
        job.load(tmp_path / "2")
        job.save(tmp_path / "3")
        job.close()

    world(3, load)
    saved, again = (read(tmp_path / folder).optimizer for folder in "23")
    for name, _ in mlp().named_parameters():
        key = f"sync0/{name}/gradients"
        residuals = [saved[f"{key}:worker:{rank}:residual"] for rank in range(2)]
        assert name.endswith("bias") or not torch.equal(*residuals)
        loaded = torch.stack([again[f"{key}:worker:{rank}:residual"] for rank in range(3)])
        torch.testing.assert_close(loaded.sum(0), residuals[0] + residuals[1])
        assert (f"{key}:owed" in saved) == ("ddp" in text and "power" not in text)
        assert f"{key}:owed" not in saved or torch.equal(again[f"{key}:owed"], saved[f"{key}:owed"])


@pytest.mark.parametrize(
    "texts",
    [
        ["ddp", 'ddp(compress="int8")', "ddp", 'ddp(compress="topk(0.1)")'],
        ["localsgd(every=2)", "ddp", 'localsgd(every=2, outer="nesterov")'],
    ],
)
def test_a_checkpoint_goes_to_ddp_and_back(world: World, tmp_path: Path, texts: list[str]) -> None:
    def save(job: Job, step: Any, losses: Any) -> int:
        job.save(tmp_path)
        return job.steps

    for i, text in enumerate(texts):
        go_on: Any = {"steps": 3 * (i + 1), "load": tmp_path if i else None, "epochs": 2}
        found = after_training(world, 2, text, save, data=samples(64), batch_size=8, **go_on)
        assert found == [3 * (i + 1)] * 2


# ---- what servers refuse ------------------------------------------------------------------------


def pushed(packed: Tensor) -> Request:
    return Request(FrameKind.COMPRESSED, payload=(bytes_of(packed),), sequence=1, is_answered=False)


@pytest.mark.parametrize("damage", ["an index", "too short", "too long"])
def test_a_push_that_names_other_elements_is_refused_and_others_go_on(damage: str) -> None:
    heads = torch.ones(1, 3)
    with servers() as found:
        rule = Rule(2, asynchronous=True)
        clients = [client_of(found, rank, rule, compress="topk(0.5)") for rank in range(2)]
        packing = PushCompression(clients[0].specs[0])
        good = packing.pack(torch.randn(packing.size), torch.zeros(packing.size))
        bad = good.clone()
        bad[:2] = torch.tensor([packing.size - BLOCK // 2]).short().view(torch.uint8)
        payload = {"an index": bad, "too short": good[:-4], "too long": torch.cat([good, good])}
        clients[0].links[0].post("push", pushed(payload[damage]))
        words = "has an index outside" if damage == "an index" else "COMPRESSED, got"
        with pytest.raises(ShoalError, match=words):
            clients[0].commit(Commit(0, 0, 1.0), heads)
        clients[1].links[0].post("push", pushed(good))
        assert clients[1].commit(Commit(0, 0, 1.0), heads).verdict == "admitted"
        clients[1].leave()


def test_a_commit_without_its_gradients_is_refused() -> None:
    with servers() as found:
        client = client_of(found, 0, Rule(1), compress="int8")
        with pytest.raises(ShoalError, match="lacks gradients"):
            client.commit(Commit(0, 0, 1.0), torch.ones(1, 3))


def test_a_method_that_is_none_is_refused_by_the_server() -> None:
    with servers() as found, pytest.raises(ShoalError, match="compress"):
        client_of(found, 0, Rule(1), compress="topk(7)")
