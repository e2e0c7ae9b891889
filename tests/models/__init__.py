"""Small models and data for tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.seeds import seeded


def mlp(seed: int = 0) -> nn.Module:
    with seeded(seed):
        return nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)
        )


def convnet(seed: int = 0) -> nn.Module:
    with seeded(seed):
        return nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * 4, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Linear(8, 3),
        )


class Partly(nn.Module):
    """Half of its parameters never get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Linear(6, 3)
        self.unused = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def samples(
    n: int, shape: tuple[int, ...] = (6,), classes: int = 3, seed: int = 1
) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(n, *shape, generator=generator),
        torch.randint(0, classes, (n,), generator=generator),
    )


class BasicBlock(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut, as in ResNet-18."""

    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if stride > 1 or inside != outside:
            conv = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.bn1(self.conv1(x)))
        out: Tensor = torch.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))
        return out


def resnet18(classes: int = 3, width: int = 64) -> nn.Module:
    """ResNet-18; `width` channels behind the first convolution."""
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    blocks: list[nn.Module] = [nn.MaxPool2d(3, 2, 1)]
    for i in range(4):
        before = width << max(0, i - 1)
        stride = 1 if i == 0 else 2
        blocks += [BasicBlock(before, width << i, stride), BasicBlock(width << i, width << i, 1)]
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width << 3, classes)
    )
