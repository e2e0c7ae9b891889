"""precision="fp16" on several workers. A CPU has no fp16 kernels worth it, so it is float32 here,
with the loss scaling of fp16."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.replica import engine
from tests.conftest import World
from tests.models import samples
from tests.splitting import assert_equal, job_of, mlp


@pytest.fixture(autouse=True)
def float32_with_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "autocast_for", lambda device, precision: nullcontext)


STRATEGIES = ["ddp", "zero(1)", "zero(2)", "zero(3)", "tp(2)", "pp(2)"]


@pytest.mark.product
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scaled_losses_train_as_on_one_worker(world: World, strategy: str) -> None:
    assert_equal(world, 2, strategy, mlp, samples(24), precision="fp16", clip_norm=0.5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_overflow_skips_the_step_on_all_workers(world: World, strategy: str) -> None:
    models = [mlp() for _ in range(2)]

    def overflowing(outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) * 1e38

    options: Any = {"loss": overflowing, "precision": "fp16"}

    def train(group: Group) -> tuple[float, bool]:
        with job_of(group, strategy, models[group.rank], **options) as (job, step):
            before = step.flat.data.clone()
            step(next(job.batches(samples(8), 8)))
            scale = step.update.scaler.state_dict()["scale"]
            return scale, torch.equal(before.nan_to_num(), step.flat.data.nan_to_num())

    assert world(2, train) == [(32768.0, True)] * 2
