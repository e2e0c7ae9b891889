"""One suite for every strategy: the result is the single-device result."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.executors.solo import solo_group
from tests.conftest import World
from tests.jobs import after_training, model_of
from tests.models import convnet, mlp, samples
from tests.splitting import SGD as SGD
from tests.splitting import assert_equal as assert_equal_to_single
from tests.splitting import train as train

NEVER_EXACT = [
    *("ddp(bucket_mb=0.0001)", 'gossip(graph="complete")', 'mapreduce(batch="mini")'),
    "gossip(graph='complete', shared_weights=True)",
    "mapreduce(batch='mini', shared_weights=True)",
]
MAY_BE_EXACT = [
    *("ddp", 'ps(placement="rank0")', 'ps(placement="workers", update="worker")'),
    *("zero(1)", "zero(2)", "zero(3)", "ddp(shared_weights=True)"),
    *("zero(1, shared_weights=True)", "zero(2, shared_weights=True)"),
]
SYNCHRONOUS = [*NEVER_EXACT, *MAY_BE_EXACT]
# equal where the optimizer is linear in the gradient: SGD, without clipping
LINEAR = [*SYNCHRONOUS, "localsgd(every=1)", 'localsgd(every=1, outer="sgd(lr=1)")']
ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)


@pytest.mark.product
@pytest.mark.parametrize("strategy", LINEAR)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_single_with_a_short_last_batch(world: World, size: int, strategy: str) -> None:
    assert_equal_to_single(world, size, strategy, mlp, samples(103), 20)


@pytest.mark.parametrize("strategy", LINEAR)
def test_a_last_batch_with_fewer_samples_than_replicas(world: World, strategy: str) -> None:
    assert_equal_to_single(world, 4, strategy, mlp, samples(22), 10)
    assert_equal_to_single(world, 4, strategy, convnet, samples(22, (1, 4, 4)), 10)


@pytest.mark.product
@pytest.mark.parametrize("strategy", SYNCHRONOUS)
@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.1},
        {"accumulate": 2},
        {"accumulate": 3, "clip_norm": 0.1},
        {"optimizer": ADAMW},
        {"lr": lambda step: 0.1 / (1 + step)},
    ],
    ids=lambda o: ",".join(o),
)
def test_equals_single_with_options(world: World, strategy: str, options: dict[str, Any]) -> None:
    assert_equal_to_single(world, 2, strategy, mlp, samples(50), 12, **options)


@pytest.mark.product
@pytest.mark.parametrize("strategy", ["ddp", "localsgd(every=1)", "zero(1)", "zero(2)", "zero(3)"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_batchnorm_sees_the_global_batch(
    world: World, size: int, accumulate: int, strategy: str
) -> None:
    data = samples(66, (1, 4, 4))
    assert_equal_to_single(world, size, strategy, convnet, data, 20, accumulate=accumulate)


def test_local_batchnorm_differs_from_single(world: World) -> None:
    data = samples(40, (1, 4, 4))
    alone = train(solo_group(), "single", convnet(), data, 20)
    models = [convnet(), convnet()]
    together = world(2, lambda g: train(g, "ddp", models[g.rank], data, 20, batchnorm="local"))
    assert together[0][0] != pytest.approx(alone[0], abs=1e-4)


class Halting(nn.Module):
    """Uses its second layer only for a batch whose first feature is positive on average."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 3)
        self.second = nn.Linear(3, 3)
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        return out + self.second(out) if x[:, 0].mean() > 5 else out


def test_a_parameter_without_gradient_is_left_alone_as_on_one_device(world: World) -> None:
    assert_equal_to_single(world, 2, "ddp(bucket_mb=0.0001)", Halting, samples(40), 10)
    assert_equal_to_single(world, 2, "ddp", Halting, samples(40), 10)


def test_a_parameter_with_a_gradient_on_one_rank_only(world: World) -> None:
    """Only rank 0's half of each batch switches the second layer on."""
    x = torch.zeros(4, 6)
    x[:2, 0] = 10.0
    batches = [(x, torch.tensor([0, 1, 2, 0]))] * 3
    options: Any = {"make": Halting, "data": batches, "batch_size": None, "shuffle": False}
    models = after_training(world, 2, "ddp", model_of, **options)
    first, second = (model.state_dict() for model in models)
    start = Halting().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["second.weight"], start["second.weight"])
    assert torch.equal(first["never.weight"], start["never.weight"])


@pytest.mark.parametrize("size", [2, 3])
def test_count_weighs_uneven_batches(world: World, size: int) -> None:
    """A loss that is a mean over tokens which are not padding."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 7, (24, 5), generator=generator)
    tokens[torch.rand(24, 5, generator=generator) < 0.4] = 0
    data = torch.utils.data.TensorDataset(tokens, tokens)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7))

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.transpose(1, 2), y, ignore_index=0)

    options: Any = {"loss": loss, "count": lambda batch: (batch[1] != 0).sum(), "epochs": 2}
    assert_equal_to_single(world, size, "ddp", make, data, 7, **options)


@pytest.mark.product
@pytest.mark.parametrize("strategy", MAY_BE_EXACT)
@pytest.mark.parametrize(("size", "microbatches"), [(1, 6), (2, 6), (3, 6), (6, 6), (4, 8), (8, 8)])
def test_exact_gives_the_same_bits(
    world: World, size: int, microbatches: int, strategy: str
) -> None:
    """Running statistics of BatchNorm included."""
    options: Any = {"exact": True, "microbatches": microbatches, "clip_norm": 0.1}
    data = samples(64, (1, 4, 4))
    assert_equal_to_single(world, size, strategy, convnet, data, 24, exactly=True, **options)
