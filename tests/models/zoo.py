"""What an entry of the zoo is: a model, samples, and a loss."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Entry:
    """`samples(n)` gives the inputs and the targets of n samples, each a tensor or a dict."""

    build: Callable[[], nn.Module]
    samples: Callable[[int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]

    def dataset(self, n: int) -> list[tuple[Any, Any]]:
        inputs, targets = self.samples(n)
        return [(row(inputs, i), row(targets, i)) for i in range(n)]


def row(value: Any, index: int) -> Any:
    if isinstance(value, dict):
        return {name: row(each, index) for name, each in value.items()}
    return value[index]


def token_loss(outputs: Any, targets: Tensor) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else outputs["logits"]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def logits_loss(outputs: Any, targets: Tensor) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else outputs["logits"]
    return F.cross_entropy(logits, targets)


def import_torchvision() -> None:
    """Import torchvision, also a CUDA build beside a CPU build of torch.

    There its operators are not loaded, and the import asks for two of them. Models need none.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
        importlib.import_module("torchvision")
