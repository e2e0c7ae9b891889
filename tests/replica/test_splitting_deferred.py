"""Models that were built without memory are filled part by part where a replica is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from tests.conftest import World
from tests.models import samples
from tests.splitting import train


class Steady(nn.Linear):
    """Starts as its shape says: threads that fill models at the same time share one generator."""

    def reset_parameters(self) -> None:
        generator = torch.Generator().manual_seed(7 * self.in_features + self.out_features)
        for p in self.parameters():
            nn.init.normal_(p, std=0.3, generator=generator)


class Net(nn.Module):
    """Two pairs that are split, one weight at two places, and BatchNorm with its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(Steady(6, 7), nn.Tanh(), Steady(7, 5))
        self.twice = Steady(5, 5, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Sequential(Steady(5, 9), nn.Tanh(), Steady(9, 5))
        self.again = Steady(5, 5)
        self.again.weight = self.twice.weight
        self.last = Steady(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.twice(self.first(x)))
        out: Tensor = self.last(self.again(self.second(x)))
        return out


def blank() -> nn.Module:
    with torch.device("meta"):
        return Net()


@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (2, 'pp(2, schedule="inter-op")'),
        (2, "tp(2)"),
        (4, 'tp(2) + pp(2, schedule="inter-op")'),
        (4, 'ddp + pp(2, schedule="inter-op")'),
        (4, "zero(1) + tp(2)"),
    ],
)
def test_it_trains_as_on_one_worker(world: World, size: int, strategy: str) -> None:
    alone = train(solo_group(), "single", blank(), samples(24), 8)

    def body(group: Group) -> Any:
        model = blank()
        found = train(group, strategy, model, samples(24), 8)
        here = sum(p.numel() for p in model.parameters() if p.device.type != "meta")
        return *found, here

    whole = sum(p.numel() for p in Net().parameters())
    together = world(size, body)
    for losses, _, here in together:
        assert losses == pytest.approx(alone[0], abs=1e-5)
        assert here < 0.8 * whole
    for name, tensor in alone[1].items():
        torch.testing.assert_close(together[0][1][name], tensor, rtol=1e-4, atol=1e-5)
