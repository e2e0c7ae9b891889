"""Context parallelism: sequences split over workers train as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.comm.group import Group
from shoal.errors import BadInput, NotBuilt
from shoal.examples.gpt import GPT, Size, next_token_loss
from tests.conftest import World
from tests.seeds import seeded
from tests.splitting import ADAMW, assert_equal, assert_own_loop_equal, job_of, mlp, texts

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


def saved_bytes(group: Group, strategy: str, model: nn.Module, data: TensorDataset) -> int:
    """Of the activations that a step keeps for its backward."""
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with job_of(group, strategy, model, **OPTIONS) as (job, step):
        batch = next(iter(job.batches(data, 2)))
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            step(batch)
        return sum(s.nbytes() for at, s in kept.items() if at not in weights)


def test_activations_are_halved_at_four_times_the_sequence(world: World) -> None:
    def long_gpt() -> nn.Module:
        torch.manual_seed(0)
        return GPT(Size(2, 16, 2, 4 * CONTEXT, 1e-2))

    data = texts(4, 4 * CONTEXT)
    assert_equal(world, 2, "cp(2)", long_gpt, data, 2, **OPTIONS)
    alone = world(1, lambda g: saved_bytes(g, "single", long_gpt(), data))[0]
    models = [long_gpt() for _ in range(2)]
    for shared in world(2, lambda g: saved_bytes(g, "cp(2)", models[g.rank], data)):
        assert 0.45 < shared / alone < 0.55


def test_inputs_without_a_sequence_are_refused(world: World) -> None:
    data = TensorDataset(torch.randn(8, 6), torch.zeros(8, dtype=torch.long))

    def body(group: Group) -> None:
        with job_of(group, "cp(2)", models[group.rank]) as (job, step):
            batch = next(iter(job.batches(data, 4)))
            with pytest.raises(BadInput, match=r"cp\(2\) splits sequences"):
                step(batch)

    models = [mlp() for _ in range(2)]
    world(2, body)


def test_sequence_parallelism_beside_it_is_refused(world: World) -> None:
    def body(group: Group) -> None:
        with pytest.raises(NotBuilt, match="both divide the positions of a sequence"):
            job_of(group, "tp(2, sequence=True) + cp(2)", gpt(), **OPTIONS).__enter__()

    world(4, body)
