"""Models that tp splits by channels train as on one worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.group import Group
from tests.conftest import World
from tests.models import samples
from tests.seeds import seeded
from tests.splitting import SGD, assert_equal, job_of, whole

images = partial(samples, shape=(3, 8, 8))


class Basic(nn.Module):
    """A block of ResNet-18, where `+=` and ReLU work in place."""

    def __init__(self, inputs: int, outputs: int, norm: Callable[[int], nn.Module]):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm2 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += self.shortcut(x)
        result: Tensor = self.relu(out)
        return result


class Bottleneck(nn.Module):
    """Pointwise, grouped, pointwise; with squeeze and excitation."""

    def __init__(self, width: int, inner: int, groups: int):
        super().__init__()
        self.expand = nn.Conv2d(width, inner, 1)
        self.norm = nn.BatchNorm2d(inner)
        self.middle = nn.Conv2d(inner, inner, 3, padding=1, groups=groups)
        self.squeeze = nn.Conv2d(inner, 3, 1)
        self.excite = nn.Conv2d(3, inner, 1)
        self.project = nn.Conv2d(inner, width, 1)
        self.scale = nn.Parameter(torch.full((inner, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.middle(F.hardswish(self.norm(self.expand(x)))))
        weight = torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        out: Tensor = x + self.project(self.scale * y * weight)
        return out


class ResNet(nn.Module):
    @seeded(0)
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3)
        self.blocks = nn.Sequential(
            Basic(6, 10, nn.BatchNorm2d),
            nn.MaxPool2d(2),
            Bottleneck(10, 12, groups=4),
            Bottleneck(10, 9, groups=9),
            Basic(10, 12, partial(nn.GroupNorm, 4)),
        )
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(
            torch.flatten(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1), 1)
        )
        return out


class UNet(nn.Module):
    """The channels of a skip connection stand before those that come from below.

    Its widths choose what is split: the layers inside of a level, or those between levels.
    """

    @seeded(0)
    def __init__(self, inner: int = 8, outer: int = 5):
        super().__init__()
        self.down = self.level(3, inner, outer)
        self.below = self.level(outer, inner, outer)
        self.up = nn.ConvTranspose2d(outer, outer, 2, stride=2)
        self.merge = self.level(2 * outer, inner, outer)
        self.head = nn.Linear(outer * 64, 3)

    def level(self, inputs: int, inner: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(inputs, inner, 3, padding=1), nn.InstanceNorm2d(inner, affine=True)),
            *(nn.LeakyReLU(), nn.Conv2d(inner, outputs, 3, padding=1), nn.BatchNorm2d(outputs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        below = self.up(self.below(F.max_pool2d(skip, 2)))
        merged = self.merge(torch.cat([skip, below], dim=1))
        out: Tensor = self.head(merged.view(x.size(0), -1))
        return out


def vgg() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 7, 3), nn.ReLU(), nn.Conv2d(7, 9, 3), nn.BatchNorm2d(9), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(36, 14), nn.ReLU(), nn.Linear(14, 3)),
    )


@pytest.mark.parametrize(
    ("size", "strategy", "make"),
    [
        (2, "tp(2)", ResNet),
        (3, "tp(3)", UNet),
        (2, "tp(2)", partial(UNet, 4, 12)),
        (4, "ddp + tp(2)", vgg),
        pytest.param(3, "tp(3)", vgg, marks=pytest.mark.whole),
        pytest.param(4, 'tp(2) + pp(2, cuts=["below.2"])', UNet, marks=pytest.mark.whole),
        pytest.param(4, "tp(4)", ResNet, marks=pytest.mark.whole),
        pytest.param(4, "ddp + tp(2)", UNet, marks=pytest.mark.whole),
        pytest.param(4, "ddp + tp(2)", ResNet, marks=pytest.mark.whole),
        pytest.param(4, "zero(3) + tp(2)", ResNet, marks=pytest.mark.whole),
        pytest.param(4, "tp(2) + pp(2)", ResNet, marks=pytest.mark.whole),
        pytest.param(2, "tp(2, sequence=True)", ResNet, marks=pytest.mark.whole),
    ],
)
def test_convolutions(
    world: World, size: int, strategy: str, make: Callable[[], nn.Module]
) -> None:
    assert_equal(world, size, strategy, make, images(12), 6, clip_norm=1.0)


def test_each_worker_has_its_channels_of_weights_and_statistics(world: World) -> None:
    def shapes(group: Group) -> Any:
        with job_of(group, "tp(2)", ResNet()) as (_, step):
            block = step.model.blocks[0]
            return [
                tuple(t.shape)
                for t in (block.conv1.weight, block.norm1.running_mean, block.conv2.weight)
            ]

    assert world(2, shapes)[0] == [(5, 6, 3, 3), (5,), (10, 5, 3, 3)]


@pytest.mark.whole
@pytest.mark.parametrize(("first", "second"), [("tp(2)", "single"), ("single", "tp(2)")])
def test_another_strategy_goes_on_from_a_checkpoint(
    world: World, tmp_path: Path, first: str, second: str
) -> None:
    def go(group: Group, strategy: str, model: nn.Module, steps: int, load: bool) -> Any:
        with job_of(group, strategy, model, optimizer=SGD) as (job, step):
            if load:
                job.load(tmp_path / "c")
            for batch in job.batches(images(24), 6, steps=steps):
                step(batch)
            if not load:
                job.save(tmp_path / "c")
            return whole(step)

    def run(strategy: str, steps: int, load: bool = False) -> dict[str, Tensor]:
        models = [ResNet() for _ in range(1 if strategy == "single" else 2)]
        results = world(len(models), lambda g: go(g, strategy, models[g.rank], steps, load))
        found: dict[str, Tensor] = results[0]
        return found

    run(first, 2)
    resumed = run(second, 4, load=True)
    for name, tensor in run("single", 4).items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-4, atol=2e-5)
