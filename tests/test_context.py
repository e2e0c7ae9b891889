"""Context parallelism: sequences split over workers train as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal.comm.group import Group
from shoal.examples.gpt import GPT, Size, next_token_loss
from tests.conftest import World
from tests.models import samples
from tests.seeds import seeded
from tests.splitting import (
    ADAMW,
    assert_equal,
    assert_own_loop_equal,
    job_of,
    mlp,
    refused,
    saved_bytes,
    texts,
)

CONTEXT = 24
OPTIONS: dict[str, Any] = {"optimizer": ADAMW, "clip_norm": 0.5, "loss": next_token_loss}


@seeded(0)
def gpt() -> nn.Module:
    return GPT(Size(2, 8, 2, CONTEXT, 1e-2))


@pytest.mark.parametrize("strategy", ["cp(2)", "cp(3)", "ddp + cp(2)"])
def test_a_gpt_is_that_of_one_device(world: World, strategy: str) -> None:
    workers = {"cp(2)": 2, "cp(3)": 3, "ddp + cp(2)": 4}[strategy]
    assert_equal(world, workers, strategy, gpt, texts(10, CONTEXT), 4, **OPTIONS)


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["cp(2) + tp(2)", "pp(2) + cp(2)"])
def test_beside_other_ways_to_split(world: World, strategy: str) -> None:
    assert_equal(world, 4, strategy, gpt, texts(10, CONTEXT), 4, **OPTIONS)


@pytest.mark.whole
@pytest.mark.parametrize(
    "strategy",
    ["zero(1) + cp(2)", "zero(2) + cp(2)", "zero(3) + cp(2)", 'ps(placement="workers") + cp(2)'],
)
def test_replicas_that_share_sequences_agree_in_every_way(world: World, strategy: str) -> None:
    assert_equal(world, 4, strategy, gpt, texts(10, CONTEXT), 4, **OPTIONS)


def test_a_length_that_does_not_divide_works(world: World) -> None:
    assert_equal(world, 2, "cp(2)", gpt, texts(4, 7), 4, accumulate=2, **OPTIONS)


def test_evaluation_sees_all_positions(world: World) -> None:
    def body(group: Group) -> float:
        with job_of(group, "cp(2)", models[group.rank], **OPTIONS) as (job, _):
            value: float = job.evaluate(next_token_loss, texts(5, CONTEXT), 2)
            return value

    models = [gpt() for _ in range(2)]
    logits = gpt()(texts(5, CONTEXT).tensors[0])
    expected = next_token_loss(logits, texts(5, CONTEXT).tensors[1]).item()
    assert world(2, body) == pytest.approx([expected] * 2)


@pytest.mark.parametrize(
    ("size", "strategy"), [(2, "cp(2)"), pytest.param(4, "ddp + cp(2)", marks=pytest.mark.whole)]
)
def test_a_loop_of_the_scripts_own(world: World, size: int, strategy: str) -> None:
    assert_own_loop_equal(world, size, strategy, gpt, texts(10, CONTEXT), next_token_loss)


def step_bytes(group: Group, strategy: str, model: nn.Module, data: TensorDataset) -> int:
    with job_of(group, strategy, model, **OPTIONS) as (job, step):
        batch = next(iter(job.batches(data, 2)))
        return saved_bytes(model, lambda: step(batch))


def test_activations_are_halved_at_four_times_the_sequence(world: World) -> None:
    def long_gpt() -> nn.Module:
        torch.manual_seed(0)
        return GPT(Size(2, 16, 2, 4 * CONTEXT, 1e-2))

    data = texts(4, 4 * CONTEXT)
    assert_equal(world, 2, "cp(2)", long_gpt, data, 2, **OPTIONS)
    alone = world(1, lambda g: step_bytes(g, "single", long_gpt(), data))[0]
    models = [long_gpt() for _ in range(2)]
    for shared in world(2, lambda g: step_bytes(g, "cp(2)", models[g.rank], data)):
        assert 0.45 < shared / alone < 0.55


def test_what_has_no_sequence_or_divides_it_twice_is_refused(world: World) -> None:
    said = refused(world, 2, "cp(2)", mlp, samples(8))
    assert "cp(2) splits sequences" in said
    said = refused(world, 4, "tp(2, sequence=True) + cp(2)", gpt, **OPTIONS)
    assert "both divide the positions of a sequence" in said
