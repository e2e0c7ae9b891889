"""SHOAL_CHECKPOINT: a job saves by itself, and goes on from what is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.launch.here.checkpoint_option import with_checkpoint
from shoal.runtime.config import CheckpointConfig, RunConfig
from shoal.runtime.preemption import EXIT_STATUS, Preemption
from shoal.train.job import Job
from tests.conftest import World
from tests.jobs import SGD, job_of
from tests.models import mlp, samples


class Crash(Exception):
    pass


def job_in(folder: Path, group: Group | None = None, preemption: Preemption | None = None) -> Job:
    config = RunConfig.from_environment(
        {"SHOAL_CHECKPOINT": str(folder), "SHOAL_CHECKPOINT_EVERY": "3"}
    )
    return job_of(group, config=config, preemption=preemption)


def losses_of(job: Job, crash_at: int | None = None, load: Path | None = None) -> dict[int, float]:
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    if load is not None:
        job.load(load)
    losses = {}
    for batch in job.batches(samples(20), batch_size=5, epochs=3):
        loss = float(step(batch))
        losses[job.steps] = loss
        if job.steps == crash_at:
            raise Crash
    return losses


def steps_in(folder: Path) -> int:
    return int(json.loads((folder / "manifest.json").read_text())["steps"])


def test_a_script_that_is_started_again_has_the_losses_of_one_that_was_not(
    tmp_path: Path, world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = losses_of(job_of())
    job = job_in(tmp_path)
    with pytest.raises(Crash), job.checkpoints.finishing():
        losses_of(job, crash_at=8)
    assert steps_in(tmp_path) == 6
    again = world(2, lambda group: losses_of(job_in(tmp_path, group)))  # on more workers, too
    assert list(again[0]) == [7, 8, 9, 10, 11, 12]
    assert again[0] == pytest.approx({n: whole[n] for n in again[0]})
    assert capfd.readouterr().err.count(f"resuming from {tmp_path} after 6 steps") == 1


def test_a_preempted_job_saves_there(tmp_path: Path) -> None:
    preemption = Preemption(None)
    job = job_in(tmp_path, preemption=preemption)
    job.on_step.append(lambda step, loss: setattr(preemption, "is_asked", job.steps == 5))
    with pytest.raises(SystemExit) as end:
        losses_of(job)
    assert end.value.code == EXIT_STATUS
    assert steps_in(tmp_path) == 5
    assert list(losses_of(job_in(tmp_path))) == list(range(6, 13))


def test_a_later_checkpoint_that_the_script_loads_itself_counts(tmp_path: Path) -> None:
    job = job_in(tmp_path / "automatic")
    with pytest.raises(Crash), job.checkpoints.finishing():
        losses_of(job, crash_at=4)
    own = job_of()
    losses_of(own)
    own.save(tmp_path / "own")
    job = job_in(tmp_path / "automatic")
    assert losses_of(job, load=tmp_path / "own") == {}
    assert job.steps == 12


def test_trial_runs_neither_save_nor_load(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    job.checkpoints.dry = True
    assert len(losses_of(job)) == 12
    job.save(tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["range", "job.epochs", "behind", "inside"])
def test_a_loop_that_could_not_go_on_after_a_crash_is_told_when_it_evaluates_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    job = job_in(tmp_path)
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    with job.checkpoints.finishing():
        for _ in job.epochs(2) if how == "job.epochs" else range(2):
            for batch in job.batches(samples(10), batch_size=5):
                step(batch)
                if how == "inside":
                    job.evaluate(F.cross_entropy, samples(5), 5)
            if how in ("range", "job.epochs"):
                job.evaluate(F.cross_entropy, samples(5), 5)
        job.evaluate(F.cross_entropy, samples(5), 5)
    said = "could not repeat job.evaluate in epochs that are finished"
    assert capsys.readouterr().err.count(said) == (how == "range")


def test_later_calls_of_shoal_run_have_folders_of_their_own() -> None:
    config = CheckpointConfig(Path("saved"))
    assert config.of_call(1) == config
    assert config.of_call(2).folder == Path("saved/call-2")


def test_the_option_names_folder_and_steps(tmp_path: Path) -> None:
    config = with_checkpoint(RunConfig(), f"{tmp_path}/saved:every=7")
    assert config.checkpoint == CheckpointConfig(tmp_path / "saved", 7)
    for text in ("", "saved:every=0", "saved:each=3"):
        with pytest.raises(BadInput, match=r"--checkpoint takes DIR or DIR:every=STEPS"):
            with_checkpoint(RunConfig(), text)
