"""What a verification run leaves behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
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
from shoal.comm.group import Group
from shoal.errors import StopTraining
from shoal.examples import clicks
from shoal.observe.capture import (
    Capture,
    DrawWatch,
    has_ragged_targets,
    ignored_targets,
    switch_off_dropout,
)
from shoal.observe.double_check import CapturedRun
from shoal.observe.verify import compare
from shoal.runtime.config import CaptureConfig
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from tests.conftest import World
from tests.jobs import SGD, job_of
from tests.models import mlp, samples

ADAGRAD = partial(torch.optim.Adagrad, lr=0.05)


def captured(group: Group, strategy: str, folder: Path, model: torch.nn.Module) -> None:
    """Three steps of the clicks example's model."""
    folder.mkdir(exist_ok=True)
    job = Job(parse(strategy), group, device=torch.device("cpu"), seed=3)
    capture = Capture(job, CaptureConfig(folder, steps=3))
    step = job.step(model, F.binary_cross_entropy_with_logits, optimizer=ADAGRAD)
    data, _ = clicks.load_clicks(400, 4000)
    with suppress(StopTraining):
        for batch in job.batches(data, 32):
            step(batch)
    capture.write()
    job.close()


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return clicks.ClicksNet(4000, 4)


@pytest.mark.parametrize("placement", ["rank0", "workers"])
def test_rows_of_an_embedding_are_compared(world: World, tmp_path: Path, placement: str) -> None:
    models = [net(), net()]
    captured(solo_group(), "single", tmp_path / "alone", net())
    strategy = f'ps(placement="{placement}")'
    world(2, lambda g: captured(g, strategy, tmp_path / "together", models[g.rank]))
    alone, together = (CapturedRun.read(tmp_path / name) for name in ("alone", "together"))
    data, _ = clicks.load_clicks(400, 4000)
    job = Job(parse("single"), solo_group(), device=torch.device("cpu"), seed=3)
    batches = itertools.islice(job.batches(data, 32), 3)
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
    watch = DrawWatch(model)
    model(torch.ones(3))
    assert watch.module == expected


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
