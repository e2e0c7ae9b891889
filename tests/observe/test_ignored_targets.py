"""Targets that a loss ignores, in a step that does not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.nn import functional as F

from shoal.observe.capture import ignores_targets
from tests.jobs import SGD, job_of
from tests.models import mlp, samples


def counted(batch: Any) -> Any:
    return (batch[1] != -100).sum()


@pytest.mark.parametrize(
    ("first", "count", "expected"), [(-100, None, True), (-100, counted, False), (0, None, False)]
)
def test_a_mean_over_fewer_targets_is_noticed(
    first: int, count: Callable[[Any], Any] | None, expected: bool
) -> None:
    x, y = samples(10).tensors
    y[0] = first
    job = job_of()
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD, count=count)
    for batch in job.batches([(x, y)]):
        step(batch)
    assert ignores_targets(step) is expected
