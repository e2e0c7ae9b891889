"""Models that were built on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.replica.deferred_init import DeferredInit
from tests.conftest import World
from tests.models import convnet, samples
from tests.splitting import assert_equal, on_workers, workers


def test_filling_gives_the_model_that_building_gives() -> None:
    """Convolutions, BatchNorm with its buffers, Linear: all initialise themselves."""
    with torch.device("meta"):
        model = convnet()
    assert all(p.is_meta for p in model.parameters())
    torch.manual_seed(0)
    DeferredInit(model).fill_all(model)
    for (name, got), wanted in zip(
        model.state_dict().items(), convnet().state_dict().values(), strict=True
    ):
        assert torch.equal(got, wanted), name


def test_in_turn_a_tensor_comes_after_its_last_fill() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
        model[2].weight = model[0].weight
    blank = DeferredInit(model)
    filled = []
    for found in blank.fill_in_turn(model, torch.device("cpu")):
        filled.append([place.name for place in found])
        full = [n for n, p in model.named_parameters() if p.untyped_storage().nbytes() > 4]
        assert full[: len(full)] == ["0.weight", "0.bias", "1.weight", "2.bias"][: len(full)]
    assert filled == [["0.bias"], ["1.weight"], ["0.weight", "2.weight"], ["2.bias"]]


def test_a_module_that_cannot_fill_itself_is_refused_by_name() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Bare())
    with pytest.raises(BadInput, match=r"1 \(Bare\) was built on the meta device and has no reset"):
        DeferredInit(model)


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
        return self.last(self.again(self.second(x)))


def blank() -> nn.Module:
    with torch.device("meta"):
        return Net()


STAGES = 'pp(2, schedule="inter-op")'


@pytest.mark.parametrize(
    "strategy", [STAGES, "tp(2)", f"tp(2) + {STAGES}", f"ddp + {STAGES}", "zero(1) + tp(2)"]
)
def test_it_trains_as_on_one_worker(world: World, strategy: str) -> None:
    whole = sum(p.numel() for p in Net().parameters())

    def held(job: Any, step: Any) -> int:
        return sum(p.numel() for p in step.model.parameters() if p.device.type != "meta")

    assert_equal(world, workers(strategy), strategy, blank, samples(24), 8)
    assert all(here < 0.8 * whole for here in on_workers(world, strategy, blank, held))
