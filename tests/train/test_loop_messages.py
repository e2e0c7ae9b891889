"""What a job says of a loop: its steps, its last loss, and a loss that is not finite."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal.errors import BadInput
from shoal.train.job import Job
from shoal.train.progress import ProgressLines
from tests.jobs import SGD, job_of

DATA = TensorDataset(torch.ones(12, 3), torch.ones(12, 1))


class Shown(ProgressLines):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def show(self, record: Mapping[str, Any]) -> None:
        self.steps.append(record["step"])


def _job(shown: Shown | None = None) -> Job:
    return job_of(progress=shown or Shown())


def test_progress_counts_the_step_whose_update_is_done_and_takes_a_loss_with_its_graph() -> None:
    shown = Shown()
    job = _job(shown)
    model, optimizer = job.setup(nn.Linear(3, 1), SGD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in job.batches(DATA, batch_size=4):
            loss = (model(x) - y).square().mean()
            job.backward(loss)
            optimizer.step()
            job.log(loss=loss)
    job.close()
    assert shown.steps == [1, 2, 3]


def test_the_last_loss_is_shown_where_the_number_of_steps_is_not_known() -> None:
    shown = Shown()
    job = _job(shown)
    step = job.step(nn.Linear(3, 1), nn.functional.mse_loss, optimizer=SGD)
    for batch in job.batches(DATA[:4] for _ in range(7)):
        job.log(loss=step(batch))
    job.close()
    assert shown.steps == [1, 7]


def test_a_loss_that_is_not_finite_is_reported_once_with_its_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = _job()
    losses = iter([1.0, 1.0, torch.nan, torch.inf])
    step = job.step(nn.Linear(3, 1), lambda o, y: o.mean() * next(losses), optimizer=SGD)
    for batch in job.batches(DATA, batch_size=3):
        job.log(loss=step(batch))
    job.close()
    assert capsys.readouterr().err.count("finite") == 1
    assert job._loss_watch.reported == 3


def test_steps_without_any_backward_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    job = _job()
    _, optimizer = job.setup(nn.Linear(3, 1), SGD)
    optimizer.step()
    optimizer.step()
    job.close()
    assert capsys.readouterr().err.count("nothing is trained") == 1


def test_a_loss_function_with_other_arguments_is_refused_in_a_sentence() -> None:
    job = _job()
    step = job.step(nn.Linear(3, 1), lambda outputs: outputs.mean(), optimizer=SGD)
    with pytest.raises(BadInput, match=r"takes \(outputs\).*loss\(outputs, targets\)"):
        step(DATA[:4])
    job.close()
