"""Pipelines train the model that one worker trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.comm.group import Group
from shoal.examples.gpt import next_token_loss
from shoal.replica.pipeline.stages import Stages
from shoal.replica.split.stage_shard import StageShard
from shoal.schedules.pipelines.catalog import schedules
from shoal.strategy.strategy import parse
from shoal.train.step.options import StepOptions
from tests.conftest import World
from tests.models import samples
from tests.seeds import ThreadGenerator, seeded
from tests.splitting import (
    ADAMW,
    assert_another_goes_on,
    assert_equal,
    assert_evaluates_equal,
    gpt,
    job_of,
    mlp,
    normed,
    refused,
    texts,
)


@pytest.mark.product
@pytest.mark.parametrize("schedule", schedules())
@pytest.mark.parametrize("size", [2, 4])
def test_an_mlp_under_every_schedule(world: World, size: int, schedule: str) -> None:
    strategy = f'pp({size}, schedule="{schedule}")'
    assert_equal(world, size, strategy, mlp, samples(28), 12, clip_norm=0.1)


@pytest.mark.product
@pytest.mark.parametrize("schedule", schedules())
@pytest.mark.parametrize("size", [2, 4])
def test_a_gpt_with_tied_embedding_under_every_schedule(
    world: World, size: int, schedule: str
) -> None:
    strategy = f'pp({size}, schedule="{schedule}", microbatches=4)'
    make = partial(gpt, size)  # with two chunks a stage, blocks are cut, too
    options = {"optimizer": ADAMW, "clip_norm": 1.0, "loss": next_token_loss}
    assert_equal(world, size, strategy, make, texts(16), 8, **options)


@pytest.mark.product
@pytest.mark.parametrize(
    "sync", ["ddp(bucket_mb=0.0001)", "zero(1)", "zero(2)", 'gossip(graph="complete")']
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
def test_replicas_of_pipelines(world: World, sync: str, schedule: str) -> None:
    strategy = f'{sync} + pp(2, schedule="{schedule}")'
    options = {"optimizer": ADAMW, "clip_norm": 0.5, "loss": next_token_loss}
    assert_equal(world, 4, strategy, gpt, texts(22), 8, **options)  # the last batch is short


@pytest.mark.parametrize(
    ("size", "strategy"),
    [*((2, f'pp(2, schedule="{schedule}")') for schedule in schedules()), (4, "ddp + pp(2)")],
)
def test_exact_gives_the_same_bits(world: World, size: int, strategy: str) -> None:
    options = {"exact": True, "microbatches": 4, "optimizer": ADAMW, "clip_norm": 0.5}
    options["loss"] = next_token_loss
    assert_equal(world, size, strategy, gpt, texts(14), 8, exactly=True, **options)


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
def test_batchnorm_sees_micro_batches_as_with_accumulation(
    world: World, schedule: str, recompute: bool
) -> None:
    strategy = f'pp(2, schedule="{schedule}", recompute={recompute})'
    assert_equal(world, 2, strategy, normed, samples(48), 16, accumulate=4)
    assert_equal(world, 4, f"ddp + {strategy}", normed, samples(48), 16, accumulate=4)
    assert_equal(
        *(world, 4, f"ddp + {strategy}", normed, samples(48), 16),
        exactly=True,
        exact=True,
        microbatches=4,
    )


@pytest.mark.parametrize(
    ("size", "strategy"), [(2, "pp(2)"), (2, 'pp(2, schedule="zb-h1")'), (4, "ddp + pp(2)")]
)
def test_batchnorm_sees_the_global_batch_by_default(world: World, size: int, strategy: str) -> None:
    assert_equal(world, size, strategy, normed, samples(48), 16)


def test_how_many_micro_batches_with_batchnorm() -> None:
    def microbatches(strategy: str, **options: Any) -> int:
        return StepOptions(**options).with_pipeline(parse(strategy).pp, normed()).accumulate

    assert microbatches("pp(2)") == 1
    assert microbatches("pp(2)", accumulate=3) == 3
    assert microbatches("pp(2, microbatches=4)") == 4
    assert microbatches("pp(2)", batchnorm="local") == 4


@pytest.mark.parametrize("schedule", schedules())
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


class Skipping(nn.Module):
    """Values that pass several cuts, one that needs no gradient, and an input used at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        first = x
        skipped = x.sign()
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * scale
            if i == 0:
                first = x
        if mask is not None:
            x = x * mask
        rows = first.shape[0]
        out: Tensor = self.head((x + first + skipped).view(rows, -1))
        return out


@pytest.mark.product
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize("size", [2, 3])
def test_values_that_skip_stages(world: World, size: int, schedule: str) -> None:
    for recompute in (False, True):
        strategy = f'pp({size}, schedule="{schedule}", recompute={recompute})'
        assert_equal(world, size, strategy, Skipping, samples(20), 10)


@pytest.mark.parametrize(
    "inputs",
    [lambda x: (x,), lambda x: (x, x.abs()), lambda x: {"x": x, "mask": x.abs()}],
    ids=["tuple", "pair", "dict"],
)
def test_inputs_may_be_tuples_and_dicts(world: World, inputs: Callable[[Tensor], Any]) -> None:
    x, y = samples(16).tensors
    assert_equal(world, 2, "pp(2)", Skipping, [(inputs(x), y)] * 2, None)


class Partly(nn.Module):
    """The second half has a gradient for some batches only; `never` has none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 3)
        self.halting = Halting()
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.halting(self.first(x))
        return out


class Halting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.always(x)
        return out + self.second(out) if x.mean() > 0.5 else out


def test_a_parameter_without_gradient_is_left_alone(world: World) -> None:
    for schedule in ("1f1b", "zb-h1"):
        assert_equal(world, 2, f'pp(2, schedule="{schedule}")', Partly, samples(24), 8)


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
    models = [uneven(), uneven()]

    def body(group: Group) -> tuple[str, ...]:
        with job_of(group, strategy, models[group.rank], example=example) as (_, step):
            assert isinstance(step.shard, StageShard)
            return step.shard.stages.cuts

    assert Stages(uneven(), 2).cuts == ("3",)
    assert world(2, body) == [("1",), ("1",)]
    assert_equal(world, 2, strategy, uneven, samples(16), 8, example=example)
    said = refused(world, 2, strategy, uneven)
    assert "give job.step(…, example=inputs) the inputs of a batch" in said


def test_evaluating(world: World) -> None:
    cases = ((2, "pp(2)"), (2, 'pp(2, schedule="bfs")'), (4, "ddp + pp(2)"))
    assert_evaluates_equal(world, cases, next_token_loss)
    assert_evaluates_equal(
        world,
        cases,
        lambda out, y: {"loss": next_token_loss(out, y), "first": out[:, 0, 0].mean()},
    )


@pytest.mark.product
@pytest.mark.parametrize("first", ["single", "zero(1) + pp(2)", 'pp(2, schedule="interleaved")'])
@pytest.mark.parametrize("second", ["single", "zero(3)", 'pp(2, schedule="zb-h1")'])
def test_what_one_strategy_saved_another_loads(
    world: World, tmp_path: Path, first: str, second: str
) -> None:
    assert_another_goes_on(world, tmp_path / "saved", first, second, gpt)


def test_what_cannot_be_split_is_refused(world: World) -> None:
    one = refused(world, 2, "pp(2)", lambda: nn.Sequential(nn.Linear(6, 3)))
    assert "Sequential cannot be split into 2 stages: its forward calls 1 modules with some" in one
    assert "stage 1 has no parameter to train" in refused(
        world, 2, 'pp(2, cuts=["1"])', lambda: nn.Sequential(nn.Linear(6, 3), nn.Tanh())
    )


def test_options_that_contradict_each_other_are_refused(world: World) -> None:
    assert "omit them in pp" in refused(world, 2, "pp(2, microbatches=4)", mlp, exact=True)
    assert "1f1b has one chunk a stage, not 3" in refused(world, 2, "pp(2, chunks=3)", mlp)


class Counting(nn.Module):
    """Its forward is another one every time, which tracing does not see."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            x = layer(x) * self.calls
        return x


class CountingSteps(nn.Module):
    """Changes a buffer in place, which tracing would do once and for all."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps.add_(1)
        out: Tensor = self.layers(x)
        return out


def test_a_buffer_that_the_forward_counts_in_has_the_value_of_one_worker(world: World) -> None:
    assert_equal(world, 2, "pp(2, microbatches=1)", CountingSteps, samples(24), 8)


class LossInTraining(nn.Module):
    """Returns something else in evaluation mode, and fails there, as a wrapped detector does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(x)
        return out if self.training else [out].missing  # type: ignore[attr-defined, no-any-return]


def test_a_model_that_fails_in_evaluation_mode_is_refused(world: World) -> None:
    said = refused(world, 2, "pp(2)", LossInTraining, samples(8))
    assert "LossInTraining fails in evaluation mode" in said


def test_stages_that_do_not_compute_what_the_model_does_are_refused(world: World) -> None:
    said = refused(world, 2, "pp(2)", Counting, samples(8))
    assert "the stages of Counting, split at layers.1, do not compute" in said


@pytest.mark.parametrize(
    ("strategy", "accumulate", "microbatches"),
    [
        ("pp(2)", 1, 4),
        ("pp(4)", 1, 8),
        ("pp(2)", 3, 3),
        ("pp(2, microbatches=5)", 3, 5),
        ('pp(2, schedule="inter-op")', 1, 1),
        ("ddp", 2, 2),
    ],
)
def test_how_many_micro_batches(strategy: str, accumulate: int, microbatches: int) -> None:
    options = StepOptions(accumulate=accumulate).with_pipeline(parse(strategy).pp)
    assert options.local_microbatches(1) == microbatches
