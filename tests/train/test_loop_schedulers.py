"""Schedulers of a loop of the user's own go on where a checkpoint was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim import lr_scheduler

from shoal.train.job import Job
from tests.jobs import job_of
from tests.models import mlp, samples
from tests.train.test_automatic_checkpoint import Crash, job_in

EPOCHS = 6
Make = Callable[[Any], Any]


def sequential(optimizer: Any) -> Any:
    parts: list[Any] = [
        lr_scheduler.ConstantLR(optimizer, 0.5, 2),
        lr_scheduler.ExponentialLR(optimizer, 0.5),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


SCHEDULERS: dict[str, Make] = {
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, EPOCHS),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 4], 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "SequentialLR": sequential,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
}


def rates_of(
    job: Job,
    make: Make,
    crash_at: int | None = None,
    each_step: bool = False,
    job_epochs: bool = False,
) -> dict[int, float]:
    """Learning rates by step, as scripts of PyTorch's tutorials have them."""
    model = mlp()
    model, optimizer = job.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = make(optimizer)
    is_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    rates = {}
    for epoch in job.epochs(EPOCHS) if job_epochs else range(EPOCHS):
        for x, y in job.batches(samples(20), 10):
            job.backward(F.cross_entropy(model(x), y))
            rates[job.steps + 1] = optimizer.param_groups[0]["lr"]
            optimizer.step()
            optimizer.zero_grad()
            if each_step:
                scheduler.step()
            if len(rates) and max(rates) == crash_at:
                raise Crash
        if not each_step:
            scheduler.step(abs(epoch - 1)) if is_plateau else scheduler.step()
    return rates


@pytest.mark.parametrize("job_epochs", [False, True], ids=["range", "job.epochs"])
@pytest.mark.parametrize("each_step", [False, True], ids=["by epoch", "by step"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_continued_loop_has_the_learning_rates_of_one_that_was_not_interrupted(
    tmp_path: Path, name: str, each_step: bool, job_epochs: bool
) -> None:
    if each_step and name == "ReduceLROnPlateau":
        pytest.skip("it steps by a loss")
    make = SCHEDULERS[name]
    whole = rates_of(job_of(), make, each_step=each_step)
    assert len(set(whole.values())) > 2
    job = job_in(tmp_path)  # saves every third step: in the middle of an epoch, and at an end
    with pytest.raises(Crash), job.checkpoints.finishing():
        rates_of(job, make, crash_at=8, each_step=each_step)
    again = rates_of(job_in(tmp_path), make, each_step=each_step, job_epochs=job_epochs)
    assert again == {step: rate for step, rate in whole.items() if step > 6}


def test_a_scheduler_that_is_made_after_job_load_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for loads in (False, True):
        job, model = job_of(), mlp()
        model, optimizer = job.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if loads:
            job.load(tmp_path)
        scheduler = lr_scheduler.StepLR(optimizer, 2)
        job.save(tmp_path)
        assert scheduler.last_epoch == 0
    assert "the state of a StepLR, and its optimizer has none like it" in capsys.readouterr().err
