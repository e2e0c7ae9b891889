"""Targets that a loss ignores, in a step that does not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shoal.observe.capture import has_ragged_targets, ignored_targets
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
    assert (ignored_targets(step) is not None) is expected


@pytest.mark.parametrize(("form", "name"), [(tuple, "batch[1]"), (dict, 'batch["labels"]')])
def test_the_hint_names_the_targets_as_the_batch_does(form: type, name: str) -> None:
    x, y = samples(10).tensors
    y[0] = -100
    job = job_of()
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    next(iter(job.batches([(x, y) if form is tuple else {"x": x, "labels": y}])))
    assert ignored_targets(step) == name
    assert not has_ragged_targets(step)


def test_lists_of_boxes_are_noticed() -> None:
    job = job_of()
    step = job.step(mlp(), F.cross_entropy, optimizer=SGD)
    boxes = [{"boxes": torch.zeros(n, 4)} for n in range(3)]
    next(iter(job.batches([(torch.zeros(3, 6), boxes)])))
    assert has_ragged_targets(step)
