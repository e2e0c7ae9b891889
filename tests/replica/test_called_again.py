"""Modules that a forward calls again behind a later stage: each stage that calls one holds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import World
from tests.models import samples
from tests.splitting import assert_equal, linears, model


def encoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6))


def opaque(x: Tensor) -> Tensor:
    """What torch.fx cannot trace."""
    return x if float(x.detach().flatten()[0]) < 1e9 else -x


@model(encoder=encoder, head=(12, 3))
def Siamese(self: Any, x: Tensor) -> Tensor:
    return self.head(torch.cat([self.encoder(opaque(x)), self.encoder(x.flip(1))], 1))


@model(encoder=encoder, between=(6, 6), head=(6, 3))
def Apart(self: Any, x: Tensor) -> Tensor:
    first = self.between(self.encoder(opaque(x)))
    return self.head(first + self.encoder(x.flip(1)))


@model(blocks=linears(3), head=(6, 3))
def Looped(self: Any, x: Tensor) -> Tensor:
    x = opaque(x)
    for _ in range(2):
        for block in self.blocks:
            x = torch.tanh(block(x))
    return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(6, 6)
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return torch.tanh(self.layer(x + self.embedding(condition)))


@model(blocks=lambda: nn.ModuleList(Block() for _ in range(4)), head=(6, 3))
def Conditioned(self: Any, x: Tensor) -> Tensor:
    condition = opaque(x)
    for block in self.blocks:
        x = block(x, condition)
    return self.head(x * self.blocks[0].embedding(condition))


@model(blocks=linears(4), head=(6, 3))
def Rescaled(self: Any, x: Tensor) -> Tensor:
    """As RWKV: halved to evaluate, and back."""
    x = opaque(x)
    if self.training == getattr(self, "is_rescaled", False):
        self.is_rescaled = not self.training
        with torch.no_grad():
            for block in self.blocks:
                block.weight.mul_(2.0 if self.training else 0.5)
    for block in self.blocks:
        x = torch.tanh(block(x))
    return self.head(x)


@pytest.mark.parametrize("kind", [Siamese, Apart, Looped, Conditioned, Rescaled])
@pytest.mark.parametrize("strategy", ["pp(2)", 'pp(2, schedule="interleaved")'])
def test_stages_call_a_module_again(world: World, kind: Any, strategy: str) -> None:
    assert_equal(world, 2, strategy, kind, samples(16))
