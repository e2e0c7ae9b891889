"""torch's schedulers under job.step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import lr_scheduler

from shoal.comm.executors.solo import solo_group
from shoal.errors import BadInput
from shoal.sync.optimizer_step import OptimizerStep
from tests.conftest import World
from tests.jobs import SGD, job_of, losses
from tests.models import mlp, samples
from tests.test_equal import train

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
DATA = samples(40)


def two_groups(named: Any) -> torch.optim.Optimizer:
    params = [p for _, p in named]  # weights and biases in turns
    return torch.optim.SGD([{"params": params[::2], "lr": 0.2}, {"params": params[1::2]}], lr=0.1)


def warm_up(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    linear = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 6)
    return lr_scheduler.SequentialLR(optimizer, [linear, cosine], milestones=[2])


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=20)


def apart(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, [lambda e: 0.5**e, lambda e: 1 / (1 + e)])


def by_hand(optimizer: Any, scheduler: Any) -> dict[str, Tensor]:
    model = mlp()
    made = optimizer(model.named_parameters())
    schedule = scheduler(made)
    for x, y in job_of().batches(DATA, 8):
        F.cross_entropy(model(x), y).backward()
        made.step()
        schedule.step()
        made.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [(SGD, warm_up), (MOMENTUM, one_cycle), (two_groups, apart), (two_groups, warm_up)],
    ids=["sequential", "one-cycle", "groups", "ratios"],
)
@pytest.mark.parametrize(
    "strategy",
    ["ddp", "zero(2)", 'ps(placement="rank0")', 'ps(placement="rank0", update="worker")'],
)
def test_a_scheduler_steps_after_every_step(
    world: World, strategy: str, optimizer: Any, scheduler: Any
) -> None:
    if strategy == 'ps(placement="rank0")' and scheduler in (one_cycle, apart):
        pytest.skip("servers are told one learning rate a step")
    models = [mlp() for _ in range(3)]
    go = partial(train, data=DATA, batch_size=8, optimizer=optimizer, scheduler=scheduler)
    found = world(2, lambda g: go(g, strategy, models[g.rank]))
    for _, parameters in [go(solo_group(), "single", models[2]), *found]:
        torch.testing.assert_close(parameters, by_hand(optimizer, scheduler), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("scheduler", [warm_up, one_cycle])
def test_a_loaded_run_continues_the_schedule(tmp_path: Path, scheduler: Any) -> None:
    options = {"optimizer": MOMENTUM, "scheduler": scheduler}
    go = partial(losses, lambda job: job.batches(DATA, 8), tmp_path, **options)
    assert go(3)[3:] == go(None, load=True)


def test_what_servers_cannot_follow_is_refused_before_the_first_step() -> None:
    def check(optimizer: Any, scheduler: Any) -> None:
        params = list(mlp().named_parameters())
        OptimizerStep(params, optimizer, scheduler=scheduler).check_for_servers()

    with pytest.raises(BadInput, match="the scheduler changes momentum"):
        check(MOMENTUM, one_cycle)
    with pytest.raises(BadInput, match="parameter groups schedules of their own"):
        check(two_groups, apart)
    check(two_groups, warm_up)


def test_what_is_no_scheduler_is_refused() -> None:
    bad: Any
    for bad, sentence in [
        (lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer), "a loop of your own"),
        (lambda optimizer: 3, "has to be a function from an optimizer to a scheduler"),
        (3, "scheduler has to be a function"),
    ]:
        with pytest.raises(BadInput, match=sentence):
            job_of().step(mlp(), F.cross_entropy, optimizer=SGD, scheduler=bad)
    with pytest.raises(BadInput, match="lr or scheduler, not both"):
        job_of().step(mlp(), F.cross_entropy, optimizer=SGD, lr=lambda s: 0.1, scheduler=warm_up)
