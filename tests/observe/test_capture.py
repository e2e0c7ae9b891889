"""What a verification run leaves behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.executors.solo import solo_group
from shoal.commands.examples import clicks
from shoal.observe.capture import (
    has_ragged_targets,
    ignored_targets,
    switch_off_dropout,
    watch_draws,
)
from shoal.observe.double_check import CapturedRun
from shoal.observe.verify import compare
from shoal.runtime.config import CaptureConfig
from tests.conftest import World
from tests.jobs import SGD, job_of
from tests.models import mlp, samples
from tests.observe.test_double_check import Kind, capture


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return clicks.ClicksNet(4000, 4)


CLICKS: Kind = (
    *(net, clicks.load_clicks(400, 4000)[0], F.binary_cross_entropy_with_logits),
    partial(torch.optim.Adagrad, lr=0.05),
)


@pytest.mark.parametrize("placement", ["rank0", "workers"])
def test_rows_of_an_embedding_are_compared(world: World, tmp_path: Path, placement: str) -> None:
    models = [net(), net()]
    folders = [tmp_path / name for name in ("alone", "together")]
    configs = [CaptureConfig(folder, steps=3) for folder in folders]
    capture(solo_group(), "single", [net()], CLICKS, configs[0])
    strategy = f'ps(placement="{placement}")'
    world(2, lambda g: capture(g, strategy, models, CLICKS, configs[1]))
    alone, together = map(CapturedRun.read, folders)
    batches = itertools.islice(job_of(seed=3).batches(CLICKS[1], 16), 3)
    looked_up = [batch[0][:, : clicks.FIELDS] for batch in batches]
    assert torch.equal(alone.tensors["rows/ids"], torch.cat(looked_up).unique().long())
    assert alone.tensors["rows/rows"].shape == (len(alone.tensors["rows/ids"]), 4)
    assert compare(alone, together, None).ok

    together.tensors["rows/rows"][5] += 0.01
    verdict = compare(alone, together, None)
    assert verdict.first_tensor is not None and verdict.first_tensor.what == "rows/rows"
    assert isinstance(models[0].rows, shoal.Embedding)


class Functional(nn.Module):
    """Rates as attributes, as in BART and OPT, and in a configuration, as in Mixtral."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(attention_dropout=0.2, router_jitter_noise=0.1, width=0.5)
        self.dropout = 0.1
        self.layer = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(F.dropout(x, self.dropout, self.training))
        return F.dropout(x, self.config.attention_dropout, self.training)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def test_rates_of_functional_dropout_are_switched_off() -> None:
    model = nn.Sequential(Functional())
    names = switch_off_dropout(model)
    assert sorted(names) == [
        *("0.attention_dropout", "0.dropout", "0.layer", "0.router_jitter_noise")
    ]
    assert torch.equal(model(torch.ones(3)), torch.ones(3))
    assert model[0].config.width == 0.5


@pytest.mark.parametrize(("inner", "expected"), [(Noise(), "1 (Noise)"), (nn.Tanh(), None)])
def test_the_module_that_draws_is_named(inner: nn.Module, expected: str | None) -> None:
    model = nn.Sequential(nn.Tanh(), inner)
    draws = watch_draws(model)
    model(torch.ones(3))
    assert next(iter(draws), None) == expected


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
