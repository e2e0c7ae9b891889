"""Checkpoints that servers write by themselves: a run that continues from them equals one that
was never interrupted."""

from __future__ import annotations

import copy
import errno
import hashlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.errors import BadInput, CheckpointError, ShoalError
from shoal.runtime.checkpoint_folders import complete_versions
from shoal.server.process.shard_file import read_shard, read_tensors_of, write_tensors
from shoal.strategy.strategy import parse
from shoal.train.checkpoints.servers import read_servers
from shoal.train.job import Job
from tests.conftest import World
from tests.failpoints import VARIABLE, doing
from tests.forked import run
from tests.jobs import after_training
from tests.models import convnet, samples
from tests.splitting import assert_close
from tests.sync.test_ps_rows import OPTIMIZERS, Clicks
from tests.sync.test_ps_rows import data as clicks

DATA = samples(48, (1, 4, 4))
RANK0 = 'ps(placement="rank0")'
WORKERS = 'ps(placement="workers")'
Saving = Callable[..., None]


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saving:
    """Servers save in `tmp_path` from now on."""

    def begin(every: int, resume: bool = False) -> None:
        monkeypatch.setenv("SHOAL_SERVER_CHECKPOINT", str(tmp_path))
        monkeypatch.setenv("SHOAL_SERVER_CHECKPOINT_EVERY", str(every))
        monkeypatch.setenv("SHOAL_SERVER_CHECKPOINT_RESUME", str(int(resume)))

    return begin


def momentum_in_groups(pairs: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    pairs = list(pairs)
    groups = [
        {"params": [p for name, p in pairs if "bias" not in name], "weight_decay": 0.1},
        {"params": [p for name, p in pairs if "bias" in name], "lr": 0.01},
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def steps_and_tensors(job: Job, step: Any, losses: list[float]) -> Any:
    """Of the steps that were taken here, and of the whole model."""
    with step.sync.full_weights():
        return len(losses), {
            name: t.detach().clone() for name, t in step.model.state_dict().items()
        }


def train(
    world: World, strategy: str, steps: int, size: int = 2, load: Path | None = None
) -> tuple[int, dict[str, Tensor]]:
    options: Any = {"optimizer": momentum_in_groups, "clip_norm": 0.5}
    options |= {"make": convnet, "data": DATA, "batch_size": 8, "epochs": 9}
    found: Any = after_training(
        world, size, strategy, steps_and_tensors, steps=steps, load=load, **options
    )
    return found[0]  # type: ignore[no-any-return]


def assert_continues(save: Saving, train: Callable[[int], tuple[int, dict[str, Tensor]]]) -> None:
    """From step 7, where servers have saved by themselves, with the same bits."""
    _, expected = train(12)
    save(every=7)
    train(9)
    save(every=7, resume=True)
    taken, found = train(12)
    assert taken == 5
    assert_same(found, expected)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("method", [None, "int8", "onebit", "topk(0.1)", "powersgd(rank=1)"])
def test_a_run_that_continues_has_the_same_bits(
    world: World, save: Saving, method: str | None
) -> None:
    compression = "" if method is None else f', compress="{method}"'
    strategy = f'ps(placement="workers"{compression})'
    assert_continues(save, partial(train, world, strategy))


@pytest.mark.parametrize("strategy", [RANK0, f'{WORKERS[:-1]}, mode="async")'])
def test_servers_do_not_save_nan_over_a_good_checkpoint(
    world: World, tmp_path: Path, save: Saving, strategy: str
) -> None:
    save(every=1)

    def body(group: Group) -> None:
        job = Job(parse(strategy), group, device=torch.device("cpu"), seed=3)

        def loss(out: Tensor, y: Tensor) -> Tensor:  # finite, and its gradient in step 6 is not
            return F.cross_entropy(out, y) + ((out.sum() * 0).sqrt() if job.steps >= 5 else 0)

        step = job.step(convnet(), loss, optimizer=momentum_in_groups)
        try:
            for batch in job.batches(DATA, 8, epochs=9):
                step(batch)
        finally:
            job.close()

    with pytest.raises(ShoalError, match=r"the loss of step \d+ is not a finite number"):
        world(2, body)
    versions = complete_versions(tmp_path)
    assert versions
    for version in versions:
        assert all(
            read_shard(file).weights.isfinite().all() for file in version.shard_files() or []
        )


def test_any_strategy_loads_what_servers_saved(
    world: World, tmp_path: Path, save: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(every=7)
    train(world, WORKERS, 9, size=3)
    (version,) = complete_versions(tmp_path)
    document = read_shard((version.shard_files() or [])[1]).document
    assert (document.ledger.version, document.ledger.pushes) == (7, [7, 7, 7])
    monkeypatch.delenv("SHOAL_SERVER_CHECKPOINT")
    _, alone = train(world, "single", 12, size=1)
    taken, found = train(world, "ddp", 12, load=tmp_path)
    assert taken == 5
    assert_close(found, alone)


@pytest.mark.parametrize("rule", ['mode="async"', "staleness=2", "quorum=0.5"])
def test_relaxed_rules_save_and_continue(
    world: World, tmp_path: Path, save: Saving, rule: str
) -> None:
    strategy = f'ps({rule}, placement="rank0")'
    save(every=5)
    train(world, strategy, 9)
    (version,) = complete_versions(tmp_path)
    assert version.number == 5
    save(every=100, resume=True)
    taken, _ = train(world, strategy, 12)
    assert taken <= 7


def test_a_full_disk_leaves_the_checkpoint_before_and_training_going(
    world: World, tmp_path: Path, save: Saving, capfd: pytest.CaptureFixture[str]
) -> None:
    _, expected = train(world, RANK0, 12)
    save(every=5)
    train(world, RANK0, 6)

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save(every=5, resume=True)
    with doing(fail, "snapshot.temporary"):
        train(world, RANK0, 12)
    assert capfd.readouterr().err.count("a server cannot write its checkpoint") == 1
    assert [version.number for version in complete_versions(tmp_path)] == [5]
    taken, found = train(world, RANK0, 12)
    assert taken == 7
    assert_same(found, expected)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    world: World, tmp_path: Path, save: Saving, capfd: pytest.CaptureFixture[str]
) -> None:
    for steps in (5, 10):
        save(every=5, resume=steps == 10)
        train(world, RANK0, steps, size=1)
    latest, _ = complete_versions(tmp_path)
    file = (latest.shard_files() or [])[0]
    data = bytearray(file.read_bytes())
    data[-2] ^= 255
    file.write_bytes(data)
    taken, _ = train(world, RANK0, 12, size=1)
    assert taken == 7
    assert "is damaged" in capfd.readouterr().err
    for version in complete_versions(tmp_path):
        for file in version.shard_files() or []:
            file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        train(world, RANK0, 12, size=1)


def forgeries(value: Any) -> Iterator[Any]:
    """The value with one part of it replaced by another, of a wrong type or size."""
    yield from (-1, 1 << 40, "x" * 100, None, [], [[1]], {"": 0}, math.nan)
    if not isinstance(value, dict | list):
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        for forged in forgeries(part):
            changed = copy.copy(value)
            changed[key] = forged
            yield changed


def test_a_forged_checkpoint_with_a_right_digest_is_refused_in_one_sentence(
    world: World, tmp_path: Path, save: Saving, whole_suite: bool
) -> None:
    save(every=5)
    train(world, RANK0, 5, size=1)
    (version,) = complete_versions(tmp_path)
    for file in version.path.glob("*.safetensors"):
        good = file.read_bytes()
        tensors, document, _ = read_tensors_of(file, dict)
        for forged in itertools.islice(forgeries(document), 0, None, 1 if whole_suite else 7):
            file.unlink()
            write_tensors(file, tensors, forged)
            with suppress(CheckpointError):  # what is read may still be of another model
                read_servers(tmp_path, print)
        for bad in (b"\xa1\xff", b"\x91" * 4000):
            data = hashlib.sha256(bad).digest() + bytes(8) + bad
            save_file({"__meta__": torch.frombuffer(bytearray(data), dtype=torch.uint8)}, file)
            with pytest.raises(CheckpointError, match="damaged"):
                read_servers(tmp_path, print)
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(CheckpointError, match="no regular file"):
            read_tensors_of(file, dict)
        file.unlink()
        file.write_bytes(good)


def test_the_folder_of_another_run_is_refused(world: World, save: Saving) -> None:
    save(every=2)
    train(world, RANK0, 3, size=1)
    with pytest.raises(BadInput, match="checkpoint of another run after 2 steps"):
        train(world, RANK0, 3, size=1)


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [("ddp", "is for ps"), ('ps(update="worker", placement="rank0")', "workers hold the weights")],
)
def test_what_servers_do_not_hold_is_not_saved(
    world: World, save: Saving, strategy: str, sentence: str
) -> None:
    save(every=2)
    with pytest.raises(BadInput, match=sentence):
        train(world, strategy, 3, size=1)


def test_rows_that_come_and_go_are_saved(world: World, save: Saving) -> None:
    def rows_of(job: Job, step: Any, losses: list[float]) -> tuple[int, dict[str, Tensor]]:
        rows = step.model.rows(torch.arange(50)).detach().clone()
        step.model.rows.discard()
        return len(losses), {"rows": rows}

    def clicked(steps: int) -> Any:
        make = partial(Clicks, OPTIMIZERS["adam"], min_count=2, ttl_steps=4)
        options: Any = {"make": make, "data": clicks(), "batch_size": 8, "epochs": 9}
        return after_training(world, 2, WORKERS, rows_of, steps=steps, **options)[0]

    assert_continues(save, clicked)


COMPRESSED = 'ps(servers=2, replicas={}, compress="topk(0.1)")'
ALL_SERVERS = "ps(servers=2)"


@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("first", "second", "killed"),
    [
        *((ALL_SERVERS, ALL_SERVERS, p) for p in ("begin", "temporary", "fsync", "rename")),
        (COMPRESSED.format(3), COMPRESSED.format(3), "worker"),
        (COMPRESSED.format(3), COMPRESSED.format(1), "worker"),
        ("ps(servers=2, replicas=3)", "ps(servers=3, replicas=2)", "worker"),
    ],
)
def test_a_run_whose_servers_were_lost_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str, killed: str
) -> None:
    """They are killed while they save, or end with a worker of a synchronous run."""

    def go(strategy: str, *options: str) -> Any:
        command = [sys.executable, "-m", "shoal", "run", "-n", "2", "-s", strategy]
        ending = ["--report", f"{tmp_path}/report", "digits", "--steps", "60"]
        return run([*command, *options, *ending], capture_output=True)

    def logged() -> Any:
        return [rank["logged"] for rank in json.loads((tmp_path / "report").read_text())["ranks"]]

    saving = ["--server-checkpoint", f"{tmp_path}/saved:every=10"]
    assert go(first).returncode == 0
    expected = logged()
    if killed != "worker":
        monkeypatch.setenv(VARIABLE, f"snapshot.{killed}:kill@3")
        monkeypatch.setenv("SHOAL_START_METHOD", "spawn")  # by the fork that is armed
    assert go(first, *saving, *(["--kill", "1@45"] if killed == "worker" else [])).returncode != 0
    assert complete_versions(tmp_path / "saved")
    monkeypatch.delenv(VARIABLE, raising=False)
    resumed = go(second, *saving, "--resume")
    assert resumed.returncode == 0 and b"resuming from" in resumed.stderr
    assert logged() == expected
