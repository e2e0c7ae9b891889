"""Modules that a forward calls again, or uses tensors of, behind a later stage."""

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


@model(first=(6, 6), act=lambda: nn.ReLU(inplace=True), blocks=linears(3), head=(6, 3))
def InPlace(self: Any, x: Tensor) -> Tensor:
    """What a stage has received is changed first."""
    x = self.act(self.first(opaque(x)))
    for block in self.blocks:
        x = nn.functional.relu(block(x), inplace=True)
    return self.head(x)


@model(head=(6, 3), blocks=linears(4))
def AskedFor(self: Any, x: Tensor) -> Tensor:
    """The head is named first and called last."""
    is_whole = self.head is not None
    x = opaque(x)
    for block in self.blocks:
        x = torch.tanh(block(x))
    return self.head(x) if is_whole else x


class Shifted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("shift", torch.linspace(0, 1, 6), persistent=False)


@model(first=Shifted, blocks=linears(3), head=(6, 3))
def Reading(self: Any, x: Tensor) -> Tensor:
    """A buffer of the first module, behind those of the last stage."""
    x = self.first(opaque(x))
    for block in self.blocks:
        x = torch.tanh(block(x))
    return self.head(x + self.first.shift)


@model(first=(6, 6), blocks=linears(3), head=(6, 3))
def LocalName(self: Any, x: Tensor) -> Tensor:
    """As a tied embedding: a parameter of the first module, behind those of the last stage."""
    first = self.first
    x = first(opaque(x))
    for block in self.blocks:
        x = torch.tanh(block(x))
    return self.head(x @ first.weight)


@model(
    layers=linears(4), norms=lambda: nn.ModuleList(nn.LayerNorm(6) for _ in range(3)), head=(6, 3)
)
def TwoLists(self: Any, x: Tensor) -> Tensor:
    x = opaque(x)
    for i, layer in enumerate(self.layers[:-1]):
        x = torch.relu(self.norms[i](layer(x)))
    return self.head(self.layers[-1](x))


@model(norm=lambda: nn.LayerNorm(6), blocks=linears(3), head=(6, 3))
def Either(self: Any, x: Tensor) -> Tensor:
    """The norm stands before the blocks or behind them."""
    is_last = len(self.blocks) > 3
    x = opaque(x) if is_last else self.norm(opaque(x))
    for block in self.blocks:
        x = torch.tanh(block(x))
    return self.head(self.norm(x) if is_last else x)


KINDS = [Siamese, Apart, Looped, Conditioned, Rescaled, InPlace, AskedFor, Reading, TwoLists]
KINDS += [Either, LocalName]


@pytest.mark.product
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["pp(2)", 'pp(2, schedule="interleaved")'])
def test_stages_call_a_module_again(world: World, kind: Any, strategy: str) -> None:
    assert_equal(world, 2, strategy, kind, samples(16))
