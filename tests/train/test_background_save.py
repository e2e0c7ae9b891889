"""`job.save(wait=False)`: what it writes is the state of the call, and nothing overtakes it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.errors import BadInput, CheckpointError
from shoal.runtime.checkpoint_folders import removals
from shoal.train.callbacks import Callback
from shoal.train.checkpoints import files
from shoal.train.job import Job
from tests.checkpoints import manifest_of, start
from tests.conftest import World
from tests.jobs import after_training, job_of
from tests.models import mlp, samples


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written before the event is set."""
    gate = threading.Event()
    write_tensors = files.write_tensors

    def wait_and_write(*args: Any) -> dict[str, Any]:
        assert gate.wait(60)
        return write_tensors(*args)

    monkeypatch.setattr(files, "write_tensors", wait_and_write)
    yield gate
    gate.set()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The disk is full once the event is set."""
    is_full = threading.Event()
    write_tensors = files.write_tensors

    def write_or_fail(*args: Any) -> dict[str, Any]:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_tensors(*args)

    monkeypatch.setattr(files, "write_tensors", write_or_fail)
    return is_full


def train(job: Job, step: Any, steps: int) -> None:
    for _, batch in zip(range(steps), job.batches(samples(10 * steps), 10), strict=False):
        step(batch)


def steps_in(folder: Path) -> int:
    return int(manifest_of(folder)["steps"])


def test_it_saves_the_state_of_the_call_while_training_goes_on(
    tmp_path: Path, writing: threading.Event
) -> None:
    job, step = start()
    train(job, step, 2)
    before = step.flat.data.clone()
    job.save(tmp_path / "m", {"name": ["x"]}, wait=False)
    train(job, step, 3)
    assert not (tmp_path / "m" / "manifest.json").exists()
    assert not torch.equal(step.flat.data, before)
    writing.set()
    job.load(tmp_path / "m")
    assert torch.equal(step.flat.data, before)
    assert job.steps == 2


def test_a_save_waits_for_the_one_before_it(tmp_path: Path, writing: threading.Event) -> None:
    job, step = start()
    for number in (1, 2, 3):
        train(job, step, 1)
        threading.Timer(0.05, writing.set).start()
        job.save(tmp_path, wait=number == 3)
        assert number == 1 or steps_in(tmp_path) in (number - 1, number)
    assert steps_in(tmp_path) == 3
    assert len(list(tmp_path.iterdir())) == 3
    removals.join()
    assert not any(thread.name == "shoal-checkpoint" for thread in threading.enumerate())


@pytest.mark.parametrize(
    "strategy",
    [
        *("ddp", "zero(1)", "zero(2)", "zero(3)", "ps", "pp(2)", "tp(2)", "hogwild"),
        *("localsgd(every=2)", "gossip"),
    ],
)
def test_under_every_strategy_it_writes_what_a_waiting_save_does(
    world: World, tmp_path: Path, strategy: str
) -> None:
    def save(job: Job, step: Any, losses: list[float]) -> None:
        job.save(tmp_path / "waiting")
        job.save(tmp_path / "model", wait=False)
        for batch in job.batches(samples(32), 16):
            step(batch)
        job.load(tmp_path / "model")
        job.save(tmp_path / "loaded", wait=False)
        with job.checkpoints.finishing():
            pass

    after_training(world, 2, strategy, save)
    wanted = files.read(tmp_path / "waiting")
    for name in ("model", "loaded"):
        found = files.read(tmp_path / name)
        for part in ("model", "optimizer"):
            tensors = getattr(found, part)
            assert tensors.keys() == getattr(wanted, part).keys()
            for key, tensor in getattr(wanted, part).items():
                torch.testing.assert_close(tensors[key], tensor)
        assert found.document["steps"] == wanted.document["steps"]


@pytest.mark.parametrize("later", ["save", "load", "end"])
def test_what_could_not_be_written_is_said_by_the_next_call_on_all_workers(
    world: World, tmp_path: Path, full: threading.Event, later: str
) -> None:
    def body(group: Group) -> str:
        job, step = start(mlp(), group)
        train(job, step, 1)
        job.save(tmp_path)
        train(job, step, 1)
        full.set()
        job.save(tmp_path, wait=False)
        try:
            with job.checkpoints.finishing():
                if later != "end":
                    getattr(job, later)(tmp_path)
        except CheckpointError as error:
            return str(error)
        return ""

    first, second = world(2, body)
    assert second == ("" if later == "end" else f"{first} (rank 0)")
    for sentence in filter(None, (first, second)):
        assert sentence.startswith(f"cannot save a checkpoint at {tmp_path}: ")
        assert "\n" not in sentence
    assert steps_in(tmp_path) == 1
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("end", [ValueError("of the script"), SystemExit(0), SystemExit(3)])
def test_a_script_that_ends_otherwise_has_its_last_checkpoint(
    tmp_path: Path, writing: threading.Event, end: BaseException
) -> None:
    job, step = start()
    train(job, step, 1)
    with pytest.raises(type(end)), job.checkpoints.finishing():
        job.save(tmp_path, wait=False)
        threading.Timer(0.05, writing.set).start()
        raise end
    assert steps_in(tmp_path) == 1


def test_the_error_of_the_script_comes_before_that_of_the_disk(
    tmp_path: Path, full: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    job, step = start()
    train(job, step, 1)
    full.set()
    with pytest.raises(ValueError, match="of the script"), job.checkpoints.finishing():
        job.save(tmp_path, wait=False)
        raise ValueError("of the script")
    assert f"cannot save a checkpoint at {tmp_path}: " in capsys.readouterr().err


def test_ctrl_c_leaves_the_checkpoint_before(tmp_path: Path, writing: threading.Event) -> None:
    writing.set()
    job, step = start()
    train(job, step, 1)
    job.save(tmp_path)
    writing.clear()
    train(job, step, 1)
    with pytest.raises(KeyboardInterrupt), job.checkpoints.finishing():
        job.save(tmp_path, wait=False)
        raise KeyboardInterrupt
    assert steps_in(tmp_path) == 1
    files.read(tmp_path)
    writing.set()
    with job.checkpoints.finishing():
        pass


def test_weights_that_are_nan_are_not_written(tmp_path: Path) -> None:
    job, step = start()
    train(job, step, 1)
    job.save(tmp_path, wait=False)
    with torch.no_grad():
        next(step.model.parameters()).fill_(torch.nan)
    job.save(tmp_path, wait=False)  # the first one has a copy of what was there
    with pytest.raises(CheckpointError, match="has values that are nan: nothing was saved"):
        job.save(tmp_path, wait=False)
    assert not files.read(tmp_path).model["0:0.weight"].isnan().any()


def test_an_about_that_is_no_json_is_refused_at_once(tmp_path: Path) -> None:
    job, _ = start()
    with pytest.raises(BadInput, match="about"):
        job.save(tmp_path, {"tensor": torch.ones(1)}, wait=False)


def test_callbacks_hear_of_it_when_it_is_complete(tmp_path: Path) -> None:
    heard = []

    class Note(Callback):
        def on_checkpoint(self, step: int, path: str) -> None:
            heard.append((step, path, steps_in(Path(path))))

    job = job_of(callbacks=[Note()])
    step = job.step(mlp(), torch.nn.functional.cross_entropy, optimizer=torch.optim.SGD)
    train(job, step, 1)
    job.save(tmp_path / "a", wait=False)
    train(job, step, 1)
    job.save(tmp_path / "b")
    assert heard == [(1, str(tmp_path / "a"), 1), (2, str(tmp_path / "b"), 2)]


@pytest.mark.parametrize("wait", [True, False])
def test_only_a_save_in_the_background_copies_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    job, step = start()
    train(job, step, 1)
    addresses = {tensor.data_ptr() for tensor in step.model.parameters()}
    written = []
    write_tensors = files.write_tensors

    def note(tensors: dict[str, Tensor], *args: Any) -> dict[str, Any]:
        written.extend(tensor.data_ptr() in addresses for tensor in tensors.values())
        return write_tensors(tensors, *args)

    monkeypatch.setattr(files, "write_tensors", note)
    job.save(tmp_path, wait=wait)
    job.checkpoints.finish()
    assert sum(written) == (len(addresses) if wait else 0)
