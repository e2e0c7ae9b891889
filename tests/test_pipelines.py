"""Pipelines train the model that one worker trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.commands.examples.gpt import next_token_loss
from shoal.replica.pipeline.stages import Stages
from shoal.schedules.pipelines.catalog import CATALOG
from shoal.strategy.strategy import parse
from shoal.train.job import Job
from shoal.train.step.options import StepOptions
from shoal.train.step.step import Step
from tests import splitting
from tests.conftest import World
from tests.models import samples
from tests.products import few_or_all
from tests.seeds import ThreadGenerator, seeded
from tests.splitting import (
    ADAMW,
    GPT_OPTIONS,
    assert_equal,
    gpt,
    linears,
    mlp,
    normed,
    on_workers,
    refused,
    texts,
    workers,
)


@pytest.mark.product(most=4)
@pytest.mark.parametrize("schedule", list(CATALOG))
@pytest.mark.parametrize("size", [2, 4])
def test_every_schedule(world: World, size: int, schedule: str) -> None:
    """The embedding of the GPT is tied; with two chunks a stage its blocks are cut, too."""
    strategy = f'pp({size}, schedule="{schedule}"'
    assert_equal(world, size, f"{strategy})", mlp, samples(28), 12, clip_norm=0.1)
    make = partial(gpt, size)
    assert_equal(world, size, f"{strategy}, microbatches=4)", make, texts(16), **GPT_OPTIONS)


@pytest.mark.parametrize(
    "strategy",
    [
        *(f'pp(2, schedule="{name}")' for name in few_or_all(["gpipe", "zb-h1"], list(CATALOG))),
        *(f"{sync} + pp(2)" for sync in ("ddp", "zero(3)", 'ps(placement="rank0")')),
        'ps(placement="workers") + pp(2)',
    ],
)
def test_exact_gives_the_same_bits(world: World, strategy: str) -> None:
    options = {"exact": True, "microbatches": 4, **GPT_OPTIONS}
    assert_equal(world, workers(strategy), strategy, gpt, texts(14), exactly=True, **options)


class Dropping(nn.Module):
    """Dropout from a generator of the rank's own: ranks are threads."""

    def __init__(self, generator: ThreadGenerator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = torch.rand(x.shape, generator=self.generator.here()) < 0.5
        return x * kept * 2 if self.training else x


@pytest.mark.parametrize("schedule", ["inter-op", "1f1b"])
def test_exact_drops_the_same(world: World, monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    generator = ThreadGenerator()
    monkeypatch.setattr(torch, "default_generator", generator)

    @seeded(0)
    def dropping() -> nn.Module:
        layers = (nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3))
        drops = (Dropping(generator), Dropping(generator))
        return nn.Sequential(layers[0], drops[0], layers[1], drops[1], layers[2])

    options = {"exact": True, "microbatches": 4}
    strategy = f'pp(2, schedule="{schedule}", recompute=True, cuts=["2"])'
    assert_equal(world, 2, strategy, dropping, samples(24), 12, exactly=True, **options)


@pytest.mark.product
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2"])
@pytest.mark.parametrize("sync", ["", "ddp + ", "zero(3) + ", 'ps(placement="rank0") + '])
def test_batchnorm_sees_micro_batches_as_with_accumulation(
    world: World, sync: str, schedule: str, recompute: bool
) -> None:
    strategy = f'{sync}pp(2, schedule="{schedule}", recompute={recompute})'
    case = (world, workers(strategy), strategy, normed, samples(48), 16)
    assert_equal(*case, accumulate=4)
    assert_equal(*case, exactly=True, exact=True, microbatches=4)


@pytest.mark.parametrize("strategy", ["pp(2)", 'pp(2, schedule="zb-h1")', "ddp + pp(2)"])
def test_batchnorm_sees_the_global_batch_by_default(world: World, strategy: str) -> None:
    assert_equal(world, workers(strategy), strategy, normed, samples(48), 16)


@pytest.mark.parametrize("schedule", list(CATALOG))
def test_recomputing_changes_nothing(world: World, schedule: str) -> None:
    strategy = f'pp(2, schedule="{schedule}", recompute=True)'
    assert_equal(world, 2, strategy, gpt, texts(16), 8, optimizer=ADAMW, loss=next_token_loss)


def test_shapes_may_change_from_batch_to_batch(world: World) -> None:
    data = [texts(rows, context).tensors for rows, context in [(8, 6), (8, 3), (5, 6), (2, 4)]]
    for strategy in ("pp(2)", 'pp(2, schedule="interleaved")'):
        assert_equal(world, 2, strategy, gpt, data, None, optimizer=ADAMW, loss=next_token_loss)


def test_fewer_rows_than_micro_batches(world: World) -> None:
    data = [tuple(t[:rows] for t in samples(8).tensors) for rows in (8, 1, 3)]
    for strategy in ("pp(2)", 'pp(2, schedule="zb-h1")'):
        assert_equal(world, 2, strategy, mlp, data, None)


def test_counting_tokens(world: World) -> None:
    tokens = texts(16).tensors[0] % 5
    data = TensorDataset(tokens, tokens)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.transpose(1, 2), y, ignore_index=0)

    def count(batch: Any) -> Tensor:
        return (batch[1] != 0).sum()

    assert_equal(world, 4, "ddp + pp(2)", gpt, data, 8, loss=loss, count=count)


@splitting.model(layers=linears(6), head=(6, 3))
def skipping(self: Any, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Values that pass several cuts, one that needs no gradient, and an input used at the end."""
    first = x
    skipped = x.sign()
    for i, layer in enumerate(self.layers):
        x = torch.tanh(layer(x)) * scale
        if i == 0:
            first = x
    if mask is not None:
        x = x * mask
    return self.head((x + first + skipped).view(first.shape[0], -1))


@pytest.mark.product
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize("size", [2, 3])
def test_values_that_skip_stages(world: World, size: int, schedule: str) -> None:
    for recompute in (False, True):
        strategy = f'pp({size}, schedule="{schedule}", recompute={recompute})'
        assert_equal(world, size, strategy, skipping, samples(20), 10)


@pytest.mark.parametrize(
    "inputs",
    [lambda x: (x,), lambda x: (x, x.abs()), lambda x: {"x": x, "mask": x.abs()}],
    ids=["tuple", "pair", "dict"],
)
def test_inputs_may_be_tuples_and_dicts(world: World, inputs: Callable[[Tensor], Any]) -> None:
    x, y = samples(16).tensors
    assert_equal(world, 2, "pp(2)", skipping, [(inputs(x), y)] * 2, None)


@splitting.model(always=(3, 3), second=(3, 3))
def halting(self: Any, x: Tensor) -> Tensor:
    out = self.always(x)
    return out + self.second(out) if x.mean() > 0.5 else out


@splitting.model(first=(6, 3), halting=halting, never=(3, 3))
def partly(self: Any, x: Tensor) -> Tensor:
    """The second half has a gradient for some batches only; `never` has none."""
    return self.halting(self.first(x))


def test_a_parameter_without_gradient_is_left_alone(world: World) -> None:
    for schedule in ("1f1b", "zb-h1"):
        assert_equal(world, 2, f'pp(2, schedule="{schedule}")', partly, samples(24), 8)


class Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.03)
        return super().forward(x)


def uneven() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Slow(6, 6), *(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3))


def test_stages_are_balanced_by_measured_time(world: World) -> None:
    """By weights the cut would be in the middle."""
    strategy = 'pp(2, balance="measured")'
    example = samples(4).tensors[0]

    def cuts(job: Job, step: Step) -> tuple[str, ...]:
        return step.shard.stages.cuts

    assert Stages(uneven(), 2).cuts == ("3",)
    assert on_workers(world, strategy, uneven, cuts, example=example) == [("1",), ("1",)]
    assert_equal(world, 2, strategy, uneven, samples(16), 8, example=example)


@splitting.model(layers=linears(2))
def counting(self: Any, x: Tensor) -> Tensor:
    """Its forward is another one every time, which tracing does not see."""
    self.calls = getattr(self, "calls", 0) + 1
    for layer in self.layers:
        x = layer(x) * self.calls
    return x


@splitting.model(layers=linears(2))
def loss_in_training(self: Any, x: Tensor) -> Tensor:
    """Returns something else in evaluation mode, and fails there, as a wrapped detector does."""
    for layer in self.layers:
        x = layer(x)
    return x if self.training else [x].missing


@pytest.mark.parametrize(
    ("strategy", "make", "said"),
    [
        (
            *("pp(2)", lambda: nn.Sequential(nn.Linear(6, 3))),
            "the model cannot be split into 2 stages: it has 1 module with something to train",
        ),
        (
            *('pp(2, cuts=["1"])', lambda: nn.Sequential(nn.Linear(6, 3), nn.Tanh())),
            "stage 1 has no parameter to train",
        ),
        ("pp(2, chunks=3)", mlp, "1f1b has one chunk a stage, not 3"),
        ("pp(2)", loss_in_training, "loss_in_training fails in evaluation mode"),
        ("pp(2)", counting, "the stages of counting, split at layers.1, do not compute"),
        ('pp(2, balance="measured")', mlp, "give job.step(…, example=inputs) the inputs of a"),
    ],
)
def test_what_cannot_be_split_is_refused(world: World, strategy: str, make: Any, said: str) -> None:
    assert said in refused(world, 2, strategy, make, samples(8))


def test_options_that_contradict_each_other_are_refused(world: World) -> None:
    assert "omit them in pp" in refused(world, 2, "pp(2, microbatches=4)", mlp, exact=True)


@splitting.model(layers=lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), steps=nn.Module)
def counting_steps(self: Any, x: Tensor) -> Tensor:
    """Changes a buffer in place, which tracing would do once and for all."""
    if self.training:
        self.steps.number.add_(1)
    return self.layers(x)


def test_a_buffer_that_the_forward_counts_in_has_the_value_of_one_worker(world: World) -> None:
    def make() -> nn.Module:
        model = counting_steps()
        model.steps.register_buffer("number", torch.tensor(0))
        return model

    assert_equal(world, 2, "pp(2, microbatches=1)", make, samples(24), 8)


@pytest.mark.parametrize(
    ("strategy", "options", "microbatches"),
    [
        ("pp(2)", {}, (4, 1)),
        ("pp(4)", {}, (8, 1)),
        ("pp(2)", {"accumulate": 3}, (3, 3)),
        ("pp(2, microbatches=5)", {"accumulate": 3}, (5, 5)),
        ('pp(2, schedule="inter-op")', {}, (1, 1)),
        ("ddp", {"accumulate": 2}, (2, 2)),
        ("pp(2)", {"batchnorm": "local"}, (4, 4)),
    ],
)
def test_how_many_micro_batches(
    strategy: str, options: dict[str, Any], microbatches: tuple[int, int]
) -> None:
    """Without BatchNorm, and with it."""
    found = [
        StepOptions(**options).with_pipeline(parse(strategy).pp, model).local_microbatches(1)
        for model in (mlp(), normed())
    ]
    assert tuple(found) == microbatches
