"""Parameters that come after the step was made would not be trained: a sentence says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.comm.executors.solo import solo_group
from shoal.errors import BadInput
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from shoal.train.model_checks import KnownParameters
from tests.conftest import World
from tests.models import mlp, samples
from tests.splitting import SGD, job_of


def _add(model: Any) -> None:
    model[2].extra = nn.Linear(2, 2)


def _replace(model: Any) -> None:
    model[2].weight = nn.Parameter(torch.zeros_like(model[2].weight))


def _append(model: Any) -> None:
    model.append(nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("change", "name"), [(_add, "2.extra.weight"), (_replace, "2.weight"), (_append, "5.weight")]
)
def test_a_step_notices(world: World, change: Any, name: str) -> None:
    models = [mlp(), mlp()]

    def run(group: Any) -> None:
        with job_of(group, "ddp", models[group.rank], optimizer=SGD) as (job, step):
            for batch in job.batches(samples(16), 8):
                step(batch)
                change(models[group.rank])

    with pytest.raises(BadInput, match=f"^{name} was added to Sequential, or replaced, after"):
        world(2, run)


def test_a_loop_notices() -> None:
    model: Any = mlp()
    job = Job(parse("ddp"), solo_group(), device=torch.device("cpu"), seed=3)
    inputs, targets = samples(4)[:]
    job.setup(model, SGD)
    model.append(nn.Linear(3, 3))
    with pytest.raises(BadInput, match=r"5\.weight was added"):
        job.backward(F.cross_entropy(model(inputs), targets))
    job.close()


def test_other_changes_do_not_matter() -> None:
    model: Any = mlp()
    known = KnownParameters(model)
    del model[2]
    model.append(nn.ReLU())
    model[0].scale = nn.Parameter(torch.ones(1), requires_grad=False)
    known.check()
    _append(model)
    with pytest.raises(BadInput, match=r"5\.weight"):
        known.check()
    known.remember()
    known.check()
