"""Training with compressed gradients, for the tests of every way to exchange them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.comm.group import Group
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from shoal.train.step.run_services import RunServices
from shoal.train.step.step import Step
from tests.conftest import World
from tests.models import mlp, samples

METHODS = ["fp16", "bf16", "int8", "onebit", "topk(0.05)", "powersgd(rank=2)"]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
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


def start(
    group: Group, text: str, model: nn.Module, services: RunServices | None = None, **options: Any
) -> tuple[Job, Step]:
    job = Job(parse(text), group, device=torch.device("cpu"), seed=3, services=services)
    return job, job.step(model, F.cross_entropy, **{"optimizer": SGD, **options})


def weights(step: Step) -> Tensor:
    return step.flat.data[step.flat.offset :].clone()


def assert_same_bits_and_learning(world: World, text: str) -> None:
    """On three workers: the same losses and weights, and the loss goes down."""
    models = [mlp() for _ in range(3)]

    def body(group: Group) -> tuple[list[float], Tensor]:
        job, step = start(group, text, models[group.rank])
        losses = [float(step(b)) for b in job.batches(signs(), 11, epochs=8)]
        job.close()
        return losses, weights(step)

    found = world(3, body)
    for losses, data in found:
        assert losses == found[0][0]
        assert torch.equal(data, found[0][1])
    assert sum(found[0][0][-4:]) < 0.5 * sum(found[0][0][:4])


def run(
    group: Group, model: nn.Module, text: str, path: Path, save_at: int | None
) -> tuple[list[float], Tensor]:
    """Six steps, saved after one of them; or the rest of them, continued from there."""
    job, step = start(group, text, model)
    if save_at is None:
        job.load(path)
    losses = []
    for batch in job.batches(samples(31), 10, epochs=2, steps=6):
        losses.append(float(step(batch)))
        if job.steps == save_at:
            job.save(path)
    job.close()
    return losses, weights(step)


def assert_continued_alike(world: World, text: str, path: Path) -> None:
    """A run that goes on from a checkpoint has the same bits as the one that saved it."""
    models = [[mlp(seed) for _ in range(3)] for seed in (0, 9)]
    whole = world(3, lambda g: run(g, models[0][g.rank], text, path, save_at=3))
    again = world(3, lambda g: run(g, models[1][g.rank], text, path, save_at=None))
    for (losses, data), (losses_again, data_again) in zip(whole, again, strict=True):
        assert losses_again == losses[3:]
        assert torch.equal(data_again, data)
