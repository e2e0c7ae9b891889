"""Scripts that are killed and started again, as people write them, train as if nothing happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.conftest import World
from tests.jobs import CPU, SGD, job_of
from tests.models import mlp, samples
from tests.scripts import script, shoal

EPOCHS, PER_EPOCH = 5, 3
Epochs = Callable[[Job, int], Iterable[int]]


def from_the_checkpoint(job: Job, start: int) -> Iterable[int]:
    return range(start, EPOCHS)


def from_zero(job: Job, start: int) -> Iterable[int]:
    return range(EPOCHS)


def those_of_the_job(job: Job, start: int) -> Iterable[int]:
    return job.epochs(EPOCHS)


class Lost(Exception):
    """Stands for a kill."""


def train(
    job: Job, path: Path, epochs: Epochs, lost_at: int | None, mid: bool, make: Callable[[], Any]
) -> tuple[int, torch.Tensor]:
    """Saves in the middle of epochs or at their ends."""
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    start = job.load(path)["epoch"] if path.exists() else 0
    data, size = make()
    for epoch in epochs(job, start):
        for number, batch in enumerate(job.batches(data, size)):
            step(batch)
            if mid and number % 2 == 0:
                job.save(path, {"epoch": epoch})
            if job.steps == lost_at:
                raise Lost
        if not mid:
            job.save(path, {"epoch": epoch + 1})
    return job.steps, step.flat.data.clone()


def dataset() -> Any:
    return samples(25), 10


def loader_that_draws() -> Any:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(samples(25), batch_size=10, shuffle=True, generator=generator), None


@pytest.mark.product
@pytest.mark.parametrize("epochs", [from_the_checkpoint, from_zero, those_of_the_job])
@pytest.mark.parametrize("mid", [False, True], ids=["at the end", "in the middle"])
@pytest.mark.parametrize("make", [dataset, loader_that_draws])
def test_a_resumed_loop_over_epochs_trains_all_of_them(
    tmp_path: Path, epochs: Epochs, mid: bool, make: Callable[[], Any]
) -> None:
    if epochs is from_zero and not mid:
        pytest.skip("finished epochs would save: refused, see below")
    whole = train(job_of(), tmp_path / "whole", epochs, None, mid, make)
    for lost_at in (5, 11):  # each continues from the one before
        with pytest.raises(Lost):
            train(job_of(), tmp_path / "model", epochs, lost_at, mid, make)
    steps, weights = train(job_of(), tmp_path / "model", epochs, None, mid, make)
    assert steps == whole[0] == EPOCHS * PER_EPOCH
    assert torch.equal(weights, whole[1])


@pytest.mark.parametrize("strategy", ["ddp", "pp(2)"])
@pytest.mark.parametrize("epochs", [from_the_checkpoint, those_of_the_job])
def test_two_workers_go_on_where_both_were(
    world: World, tmp_path: Path, strategy: str, epochs: Epochs
) -> None:
    def run(name: str, lost_at: int | None) -> list[Any]:
        def body(group: Group) -> Any:
            job = Job(parse(strategy), group, device=CPU, seed=3)
            try:
                return train(job, tmp_path / name, epochs, lost_at, False, dataset)
            except Lost:
                return None
            finally:
                job.close()

        return world(2, body)

    whole = run("whole", None)
    run("model", 7)
    for mine, of_whole in zip(run("model", None), whole, strict=True):
        assert mine[0] == of_whole[0] == EPOCHS * PER_EPOCH
        assert torch.equal(mine[1], of_whole[1])


def in_range(path: Path, epochs: int, saves: bool = False, evaluates: int | None = None) -> None:
    """Evaluates in one epoch, and behind all of them."""
    job = job_of()
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    if path.exists():
        job.load(path)
    for epoch in range(epochs):
        for batch in job.batches(*dataset()):
            step(batch)
        if epoch == evaluates:
            job.evaluate(F.cross_entropy, samples(5), 5)
        if saves:
            job.save(path)
    job.evaluate(F.cross_entropy, samples(5), 5)
    job.close()


def test_a_finished_epoch_neither_saves_nor_evaluates_and_names_job_epochs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    in_range(model, 2, saves=True)
    saved = (model / "manifest.json").read_bytes()
    with pytest.raises(BadInput, match=r"job.save in an epoch .* step 6: .* job.epochs\(n\)"):
        in_range(model, 3, saves=True)
    assert (model / "manifest.json").read_bytes() == saved
    assert "without batches: write `for epoch in job.epochs(n):`" in capsys.readouterr().err
    with pytest.raises(BadInput, match=r"job\.evaluate in an epoch"):
        in_range(model, 3, evaluates=1)
    in_range(model, 3, evaluates=2)  # the one that is left


def test_a_script_that_stops_before_the_checkpoint_was_not_at_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_range(tmp_path / "model", EPOCHS, saves=True)
    in_range(tmp_path / "model", 2)
    assert "nothing was trained: the checkpoint is of step 15" in capsys.readouterr().err
    in_range(tmp_path / "model", EPOCHS)
    assert "nothing is left to train: step 15 was the last one" in capsys.readouterr().err


def test_a_loop_that_may_be_any_of_several_is_refused(tmp_path: Path) -> None:
    def in_a_while(epoch: int) -> None:
        job = job_of()
        step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
        if epoch:
            job.load(tmp_path)
        while epoch < 2:
            for batch in job.batches(*dataset()):
                step(batch)
            epoch += 1
        job.save(tmp_path)

    in_a_while(0)
    with pytest.raises(BadInput, match=r"2 loops over job.batches had begun .* job.epochs\(n\)"):
        in_a_while(1)


@pytest.mark.product
@pytest.mark.parametrize("strategy", ["ddp", 'ps(placement="rank0")', "pp(2)"])
@pytest.mark.parametrize("lost_at", [3, 6, 9])
def test_two_loops_an_epoch_with_saves_between_and_behind_them(
    world: World, tmp_path: Path, strategy: str, lost_at: int
) -> None:
    """An epoch is two batches of one dataset and one of another, in which the script is lost."""

    def run(name: str, lost_at: int | None) -> list[Any]:
        def body(group: Group) -> Any:
            job = Job(parse(strategy), group, device=CPU, seed=3)
            step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
            if (tmp_path / name).exists():
                job.load(tmp_path / name)
            try:
                for _ in job.epochs(4):
                    for batch in job.batches(samples(20), 10):
                        step(batch)
                    job.save(tmp_path / name)
                    for batch in job.batches(samples(10, seed=5), 10):
                        step(batch)
                        if job.steps == lost_at:
                            return None
                    job.save(tmp_path / name)
                return job.steps, step.flat.data.clone()
            finally:
                job.close()

        return world(2, body)

    whole = run("whole", None)
    run("model", lost_at)
    if lost_at == 3:  # nothing tells whether epoch 0 had a second loop
        with pytest.raises(BadInput, match=r"saved in epoch 0 .* before this loop"):
            run("model", None)
        return
    for mine, of_whole in zip(run("model", None), whole, strict=True):
        assert mine[0] == of_whole[0] == 12
        assert torch.equal(mine[1], of_whole[1])


@pytest.mark.parametrize("lost_at", [3, 4])
def test_a_loop_that_first_runs_in_epoch_1(tmp_path: Path, lost_at: int) -> None:
    """Two batches an epoch; from epoch 1 on, before the save, one of another dataset."""

    def run(name: str, lost_at: int | None) -> tuple[int, torch.Tensor]:
        job = job_of()
        step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
        if (tmp_path / name).exists():
            job.load(tmp_path / name)

        def train_on(data: Any) -> None:
            for batch in job.batches(data, 10):
                step(batch)
                if job.steps == lost_at:
                    raise Lost

        for epoch in job.epochs(4):
            train_on(samples(20))
            if epoch >= 1:
                train_on(samples(10, seed=5))
            job.save(tmp_path / name)
        return job.steps, step.flat.data.clone()

    whole = run("whole", None)
    with pytest.raises(Lost):
        run("model", lost_at)
    steps, weights = run("model", None)
    assert steps == whole[0] == 11
    assert torch.equal(weights, whole[1])


def test_another_script_trains_on_all_of_its_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(job_of(), tmp_path / "model", from_zero, None, False, dataset)
    job = job_of()
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    job.load(tmp_path / "model")
    assert len([step(batch) for batch in job.batches(samples(40), 10, epochs=2)]) == 8
    assert "no loop over job.batches at call 1 in test_another_script" in capsys.readouterr().err


SCRIPT = script("""
def train(job):
    step = job.step(model(), loss, optimizer=sgd)
    start = job.load("model")["epoch"] if os.path.exists("model") else 0
    for epoch in EPOCHS:
        for batch in job.batches(data, batch_size=32):
            value = step(batch)
            if "--die" in sys.argv and job.steps == 14:
                os.kill(os.getpid(), 9)
        job.save("model", {"epoch": epoch + 1})
    job.print(f"{job.steps} steps, loss {float(value):.6f}")
""")


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["ddp", "ps", "pp(2)"])
@pytest.mark.parametrize("epochs", ["range(start, 6)", "job.epochs(6)"])
def test_a_killed_script_ends_as_one_that_was_not(
    tmp_path: Path, strategy: str, epochs: str
) -> None:
    ends = {}
    for name, runs in {"whole": [()], "killed": [("--die",), ()]}.items():
        (folder := tmp_path / name).mkdir()
        (folder / "train.py").write_text(SCRIPT.replace("EPOCHS", epochs))
        for words in runs:
            done = shoal("run", "-n", "2", "-s", strategy, "train.py", *words, cwd=folder)
        assert done.returncode == 0, done.stderr
        ends[name] = next(line for line in done.stdout.splitlines() if "steps, loss" in line)
    assert ends["killed"] == ends["whole"]
    assert "24 steps" in ends["whole"]
