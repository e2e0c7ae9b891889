"""What tests of lost workers share: samples that can be told apart, and the end of a worker."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset


class Killed(BaseException):
    """This life of a worker is over."""


def numbered_samples(count: int) -> TensorDataset:
    """Samples that hold their number, so that it can be seen which were trained on."""
    rows = torch.randn(count, 6, generator=torch.Generator().manual_seed(3))
    rows[:, 0] = torch.arange(count) / count
    return TensorDataset(rows, torch.arange(count) % 3)
