"""Checkpoints that servers write by themselves: a run that continues from them equals one that
was never interrupted."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.errors import BadInput, CheckpointError
from shoal.runtime.checkpoint_folders import complete_versions
from shoal.runtime.failpoints import armed
from shoal.server.process.shard_file import read_shard
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.conftest import World
from tests.forked import run
from tests.models import convnet, samples
from tests.sync.test_ps_rows import OPTIMIZERS, Clicks
from tests.sync.test_ps_rows import data as clicks

CPU = torch.device("cpu")
DATA = samples(48, (1, 4, 4))


def save_in(monkeypatch: pytest.MonkeyPatch, folder: Path, every: int, resume: bool) -> None:
    monkeypatch.setenv("SHOAL_SERVER_CHECKPOINT", str(folder))
    monkeypatch.setenv("SHOAL_SERVER_CHECKPOINT_EVERY", str(every))
    monkeypatch.setenv("SHOAL_SERVER_CHECKPOINT_RESUME", str(int(resume)))


def momentum_in_groups(pairs: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    pairs = list(pairs)
    groups = [
        {"params": [p for name, p in pairs if "bias" not in name], "weight_decay": 0.1},
        {"params": [p for name, p in pairs if "bias" in name], "lr": 0.01},
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def train(
    group: Group, strategy: str, model: nn.Module, steps: int, load: Path | None = None
) -> tuple[int, dict[str, Tensor]]:
    """The steps that were taken here, and the tensors of the model."""
    job = Job(parse(strategy), group, device=CPU, seed=3)
    try:
        step = job.step(model, F.cross_entropy, optimizer=momentum_in_groups, clip_norm=0.5)
        if load is not None:
            job.load(load)
        taken = sum(1 for b in job.batches(DATA, 8, epochs=9, steps=steps) if step(b) is not None)
        with step.sync.full_weights():
            found = {name: t.detach().clone() for name, t in step.model.state_dict().items()}
    finally:
        job.close()
    return taken, found


def of_world(
    world: World, size: int, strategy: str, steps: int, load: Path | None = None
) -> tuple[int, dict[str, Tensor]]:
    models = [convnet() for _ in range(size)]
    found: list[Any] = world(size, lambda g: train(g, strategy, models[g.rank], steps, load))
    return found[0]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("method", [None, "int8", "onebit", "topk(0.1)", "powersgd(rank=1)"])
def test_a_run_that_continues_has_the_same_bits(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str | None
) -> None:
    compression = "" if method is None else f', compress="{method}"'
    strategy = f'ps(placement="workers"{compression})'
    _, expected = of_world(world, 2, strategy, 12)
    save_in(monkeypatch, tmp_path, every=7, resume=False)
    of_world(world, 2, strategy, 9)
    save_in(monkeypatch, tmp_path, every=7, resume=True)
    taken, found = of_world(world, 2, strategy, 12)
    assert taken == 5
    assert_same(found, expected)


def test_any_strategy_loads_what_servers_saved(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_in(monkeypatch, tmp_path, every=7, resume=False)
    of_world(world, 3, 'ps(placement="workers")', 9)
    (version,) = complete_versions(tmp_path)
    document = read_shard((version.shard_files() or [])[1]).document
    assert [push.sequence for push in document.pushes] == [7, 7, 7]
    assert all(push.incarnation for push in document.pushes)
    assert document.ledger.version == 7
    monkeypatch.delenv("SHOAL_SERVER_CHECKPOINT")
    _, alone = train(solo_group(), "single", convnet(), 12)
    taken, found = of_world(world, 2, "ddp", 12, tmp_path)
    assert taken == 5
    for name, tensor in alone.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("rule", ['mode="async"', "staleness=2", "quorum=0.5"])
def test_relaxed_rules_save_and_continue(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    strategy = f'ps({rule}, placement="rank0")'
    save_in(monkeypatch, tmp_path, every=5, resume=False)
    of_world(world, 2, strategy, 9)
    (version,) = complete_versions(tmp_path)
    assert version.number == 5
    save_in(monkeypatch, tmp_path, every=100, resume=True)
    taken, _ = of_world(world, 2, strategy, 12)
    assert taken <= 7


def test_a_full_disk_leaves_the_checkpoint_before_and_training_going(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    strategy = 'ps(placement="rank0")'
    _, expected = of_world(world, 2, strategy, 12)
    save_in(monkeypatch, tmp_path, every=5, resume=False)
    of_world(world, 2, strategy, 6)

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save_in(monkeypatch, tmp_path, every=5, resume=True)
    with armed("snapshot.temporary", fail):
        of_world(world, 2, strategy, 12)
    assert capfd.readouterr().err.count("a server cannot write its checkpoint") == 1
    assert [version.number for version in complete_versions(tmp_path)] == [5]
    taken, found = of_world(world, 2, strategy, 12)
    assert taken == 7
    assert_same(found, expected)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for steps, resume in ((5, False), (10, True)):
        save_in(monkeypatch, tmp_path, every=5, resume=resume)
        train(solo_group(), 'ps(placement="rank0")', convnet(), steps)
    latest, _ = complete_versions(tmp_path)
    damage((latest.shard_files() or [])[0])
    taken, _ = train(solo_group(), 'ps(placement="rank0")', convnet(), 12)
    assert taken == 7
    assert "is damaged" in capfd.readouterr().err
    for version in complete_versions(tmp_path):
        for file in version.shard_files() or []:
            file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        train(solo_group(), 'ps(placement="rank0")', convnet(), 12)


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-2] ^= 255
    file.write_bytes(data)


def test_the_folder_of_another_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_in(monkeypatch, tmp_path, every=2, resume=False)
    train(solo_group(), 'ps(placement="rank0")', convnet(), 3)
    with pytest.raises(BadInput, match="checkpoint of another run after 2 steps"):
        train(solo_group(), 'ps(placement="rank0")', convnet(), 3)


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [("ddp", "is for ps"), ('ps(update="worker", placement="rank0")', "workers hold the weights")],
)
def test_what_servers_do_not_hold_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, sentence: str
) -> None:
    save_in(monkeypatch, tmp_path, every=2, resume=False)
    with pytest.raises(BadInput, match=sentence):
        train(solo_group(), strategy, convnet(), 3)


def click(group: Group, model: Clicks, steps: int) -> tuple[int, Tensor]:
    job = Job(parse('ps(placement="workers")'), group, device=CPU, seed=3)
    step = job.step(model, F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1))
    taken = sum(1 for b in job.batches(clicks(), 8, epochs=9, steps=steps) if step(b) is not None)
    rows = model.rows(torch.arange(50)).detach().clone()
    model.rows.discard()
    job.close()
    return taken, rows


def test_rows_that_come_and_go_are_saved(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clicked(steps: int) -> tuple[int, Tensor]:
        models = [Clicks(OPTIMIZERS["adam"], min_count=2, ttl_steps=4) for _ in range(2)]
        found: list[Any] = world(2, lambda g: click(g, models[g.rank], steps))
        return found[0]

    _, expected = clicked(12)
    save_in(monkeypatch, tmp_path, every=7, resume=False)
    clicked(9)
    save_in(monkeypatch, tmp_path, every=7, resume=True)
    taken, rows = clicked(12)
    assert taken == 5
    torch.testing.assert_close(rows, expected, rtol=0, atol=0)


@pytest.mark.whole
@pytest.mark.parametrize("point", ["begin", "temporary", "fsync", "rename"])
def test_servers_are_killed_while_they_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Every replica of the shard is lost; the run is started again."""
    command = [sys.executable, "-m", "shoal", "run", "digits", "-n", "2", "-s", "ps(servers=2)"]
    saving = ["--server-checkpoint", f"{tmp_path}/saved:every=10"]
    ending = ["--report", f"{tmp_path}/report", "--", "--steps", "60"]
    run([*command, *ending], check=True)
    expected = logged(tmp_path)
    monkeypatch.setenv("SHOAL_FAILPOINTS", f"snapshot.{point}:kill@3")
    assert run([*command, *saving, *ending]).returncode != 0
    assert complete_versions(tmp_path / "saved")
    monkeypatch.delenv("SHOAL_FAILPOINTS")
    resumed = run([*command, *saving, "--resume", *ending], check=True, capture_output=True)
    assert b"resuming from" in resumed.stderr
    assert logged(tmp_path) == expected


COMPRESSED = 'ps(servers=2, replicas={}, compress="topk(0.1)")'


@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (COMPRESSED.format(3), COMPRESSED.format(3)),
        (COMPRESSED.format(3), COMPRESSED.format(1)),
        ("ps(servers=2, replicas=3)", "ps(servers=3, replicas=2)"),
    ],
)
def test_a_run_of_replicas_that_was_lost_continues(tmp_path: Path, first: str, second: str) -> None:
    """A synchronous run ends with its worker, and all its servers with it."""
    command = [sys.executable, "-m", "shoal", "run", "digits", "-n", "2"]
    saving = ["--server-checkpoint", f"{tmp_path}/saved:every=10"]
    ending = ["--report", f"{tmp_path}/report", "--", "--steps", "60"]
    run([*command, "-s", first, *ending], check=True)
    expected = logged(tmp_path)
    assert run([*command, "-s", first, *saving, "--kill", "1@45", *ending]).returncode != 0
    assert complete_versions(tmp_path / "saved")
    resumed = run(
        [*command, "-s", second, *saving, "--resume", *ending], check=True, capture_output=True
    )
    assert b"resuming from" in resumed.stderr
    assert logged(tmp_path) == expected


def logged(folder: Path) -> Any:
    document = json.loads((folder / "report").read_text())
    return [rank["logged"] for rank in document["ranks"]]
