"""What torch.distributed can do, as functions of a rank; `torch_features` runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Rank:
    """Where a feature runs."""

    rank: int
    size: int
    folder: Path  # common to all ranks

    def numbers(self, count: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
        """Small whole numbers, so that sums are exact in any order; different on every rank."""
        return (torch.arange(count) % 3 + self.rank + 1).to(dtype)


Feature = Callable[[Rank], Any]
FEATURES: dict[str, Feature] = {}


def feature(body: Feature) -> Feature:
    return named(body.__name__.replace("_", " "), body)


def named(name: str, body: Feature) -> Feature:
    assert name not in FEATURES, name
    FEATURES[name] = body
    return body


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(at: Rank) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(at.rank))


def train(net: Any, at: Rank, optimizer: Any = None, steps: int = 3) -> list[Tensor]:
    """A few steps on this rank's batch; the weights after them."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(batch(at)).square().mean().backward()
        optimizer.step()
    return weights(net)


def weights(net: Any) -> list[Tensor]:
    return [whole(parameter.detach()) for parameter in net.parameters()]


def whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value
