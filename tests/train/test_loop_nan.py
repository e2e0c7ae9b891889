"""A loss that is not a finite number, in a loop of the user's own: as with job.step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.errors import ShoalError
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.conftest import World
from tests.jobs import CPU, job_of
from tests.models import mlp, samples


def nan_at(step: int, where: Path, strategy: str, **options: Any) -> Callable[[Group], Any]:
    """Trains seven steps and saves each; the loss of one of them is nan."""

    models = [mlp(), mlp()]

    def body(group: Group) -> Any:
        job = Job(parse(strategy), group, device=CPU)
        made = models[group.rank]
        model, optimizer = job.setup(made, torch.optim.SGD(made.parameters(), lr=0.1), **options)
        x, y = samples(12).tensors
        for number in range(7):
            is_nan = number + 1 == step and group.rank == 0
            job.backward(F.cross_entropy(model(x * float("nan") if is_nan else x), y))
            optimizer.step()
            optimizer.zero_grad()
            job.save(where)
        job.close()
        return job.steps, all(p.isfinite().all() for p in model.parameters())

    return body


@pytest.mark.parametrize("strategy", ["ddp", "zero(1)"])
def test_a_loop_stops_at_nan_and_keeps_the_checkpoint_before(
    world: World, tmp_path: Path, strategy: str
) -> None:
    scaler = torch.amp.GradScaler("cpu")  # of something else
    with pytest.raises(ShoalError, match=r"the loss of step 4 is not a finite number .* stops"):
        world(2, nan_at(4, tmp_path, strategy))
    assert (
        json.loads((tmp_path / "manifest.json").read_text())["steps"] == 3 and scaler.is_enabled()
    )


@pytest.mark.parametrize(
    ("strategy", "on_nan", "is_finite"),
    [("ddp", "skip", True), ("zero(1)", "skip", True), ("ddp", "go on", False)],
)
def test_a_step_of_nan_is_left_out_by_all_ranks_or_trained(
    world: World, tmp_path: Path, strategy: str, on_nan: str, is_finite: bool
) -> None:
    assert world(2, nan_at(4, tmp_path, strategy, on_nan=on_nan)) == [(7, is_finite)] * 2
    assert json.loads((tmp_path / "manifest.json").read_text())["steps"] == 7


def test_a_scaler_that_skips_a_step_by_itself_does_not_stop_the_run() -> None:
    job, model = job_of(), mlp()
    model, optimizer = job.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for i in range(5):
        loss = model(samples(12).tensors[0]).mean()
        job.backward(scaler.scale(loss * (torch.inf if i == 2 else 1)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert job.steps == 4 and all(p.isfinite().all() for p in model.parameters())
