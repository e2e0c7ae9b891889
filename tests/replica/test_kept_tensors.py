"""Tensors that modules keep as attributes while they compute, under pipelines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.errors import BadInput
from tests.conftest import World
from tests.models import samples
from tests.splitting import assert_close, assert_equal, train


class Block(nn.Module):
    aux: Any = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x))
        if self.training:
            self.aux = y.square().mean()
        return y


class Net(nn.Module):
    """The blocks keep an auxiliary loss in training mode alone."""

    kept: Any = 0.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.last(x)
        return logits


class Untraced(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if bool(x.isfinite().all()) else x * 0)


class Adding(Net):
    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        first: Any = self.blocks[0]
        added: Tensor = logits + first.aux
        return added


class UntracedAdding(Adding):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if bool(x.isfinite().all()) else x * 0)


class Keeping(Net):
    """The model itself keeps what its loss uses."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        self.kept = first.square().mean()
        hidden = first
        for block in self.blocks[1:]:
            hidden = block(hidden)
        logits: Tensor = self.last(hidden)
        return logits


def _with_aux(model: Any, outputs: Tensor, targets: Tensor) -> Any:
    return F.cross_entropy(outputs, targets) + sum(block.aux for block in model.blocks)


def _with_kept(model: Any, outputs: Tensor, targets: Tensor) -> Any:
    return F.cross_entropy(outputs, targets) + model.kept


def _pipelined(world: World, make: Callable[[], nn.Module], loss: Any = None) -> Any:
    models = [make(), make()]

    def run(group: Group) -> Any:
        model = models[group.rank]
        used = F.cross_entropy if loss is None else partial(loss, model)
        return train(group, "pp(2)", model, samples(16), 8, loss=used)

    return world(2, run)


@pytest.mark.parametrize(
    ("make", "loss"),
    [(Net, _with_aux), (Untraced, _with_aux), (Adding, None), (UntracedAdding, None)],
)
def test_what_another_stage_keeps_cannot_be_used(
    world: World, make: Callable[[], nn.Module], loss: Any
) -> None:
    with pytest.raises(BadInput, match=r"blocks\.0\.aux is set by stage 0 .* let the forward of"):
        _pipelined(world, make, loss)


@pytest.mark.parametrize("make", [Net, Untraced])
def test_what_is_kept_and_not_used_does_not_matter(
    world: World, make: Callable[[], nn.Module]
) -> None:
    assert_equal(world, 2, "pp(2)", make, samples(16))


def test_the_loss_uses_what_the_model_keeps(world: World) -> None:
    model = Keeping()
    alone = train(solo_group(), "single", model, samples(16), 8, loss=partial(_with_kept, model))
    losses, tensors = _pipelined(world, Keeping, _with_kept)[0]
    assert losses == pytest.approx(alone[0], abs=2e-5)
    assert_close(tensors, alone[1])
