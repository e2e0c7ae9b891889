"""A loss that adds its samples up depends on how a batch is cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.commands.verify import _reasons
from shoal.errors import BadInput
from shoal.observe.captured_run import CapturedRun
from shoal.replica.loss import sum_of_samples
from tests.jobs import SGD, job_of
from tests.models import mlp

SUM = nn.CrossEntropyLoss(reduction="sum")


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (SUM, "CrossEntropyLoss"),
        (partial(F.mse_loss, reduction="sum"), "mse_loss"),
        (nn.KLDivLoss(reduction="batchmean"), None),
        (partial(F.mse_loss, reduction="mean"), None),
        (F.cross_entropy, None),
        (None, None),
    ],
)
def test_a_sum_of_torch_is_known(loss: Any, name: str | None) -> None:
    assert sum_of_samples(loss) == name


def test_a_sum_is_refused_where_a_batch_is_cut() -> None:
    job_of().step(mlp(), SUM, optimizer=SGD)
    with pytest.raises(BadInput, match='CrossEntropyLoss has reduction="sum"'):
        job_of().step(mlp(), SUM, optimizer=SGD, accumulate=2)


def run(loss: float) -> CapturedRun:
    return CapturedRun([loss], {"w": torch.ones(1)}, 1, 0.0, [], exact=False)


def test_verify_names_a_sum() -> None:
    (reason,) = _reasons(run(40.0), run(20.0), 2)
    assert "1/2 of that of one worker, so it is probably a sum over samples" in reason
    assert not list(_reasons(run(2.5), run(2.4), 2))
    assert not list(_reasons(run(0.0), run(0.0), 2))
