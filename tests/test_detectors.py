"""Models that return losses in training and something else in evaluation, as detectors do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conftest import World
from tests.models import samples
from tests.seeds import seeded
from tests.splitting import assert_equal


class Convolution(nn.Conv2d):
    """It computes as nn.Conv2d does."""

    def extent(self) -> int:
        return self.kernel_size[0]


class Detector(nn.Module):
    """It keeps a table for the size of its first image, and has losses in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Convolution(3, 12, 3, padding=1)
        self.second = Convolution(12, 12, 3, padding=1)
        self.boxes = nn.Linear(12, 4)
        self.classes = nn.Linear(12, 3)
        self.table: list[Any] = []

    def forward(self, images: Tensor, targets: Tensor) -> Any:
        if not self.table:
            self.table.append(1.0 / images.shape[-1])
        features = self.second(torch.relu(self.first(images))).mean((2, 3)) * self.table[0]
        boxes = self.boxes(features)
        classes = self.classes(features)
        if not self.training:
            return [boxes, classes]
        return {"boxes": boxes.square().mean(), "classes": F.cross_entropy(classes, targets)}


class Losses(nn.Module):
    @seeded(0)
    def __init__(self) -> None:
        super().__init__()
        self.detector = Detector()

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        losses: dict[str, Tensor] = self.detector(images, targets)
        return losses["boxes"] + losses["classes"]


@pytest.mark.parametrize(
    ("size", "strategy"),
    [(2, "tp(2)"), pytest.param(4, "ddp + tp(2)", marks=pytest.mark.whole)],
)
def test_losses_in_training_alone(world: World, size: int, strategy: str) -> None:
    data = samples(12, (3, 8, 8))
    named = [{"images": image, "targets": target} for image, target in data]
    assert_equal(world, size, strategy, Losses, named, 6, loss=None)
