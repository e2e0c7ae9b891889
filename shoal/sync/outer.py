"""Outer optimizers: what moves the weights that replicas agree on."""

from __future__ import annotations

import torch
from torch import nn

from shoal.settings import outer_settings


def make_outer(text: str, weights: nn.Parameter) -> torch.optim.Optimizer:
    """`nesterov(lr=0.7)` and the like, on the flat buffer: all of them work element by element."""
    name, settings = outer_settings(text)
    if name == "adam":
        betas = settings["beta1"], settings["beta2"]
        return torch.optim.Adam([weights], settings["lr"], betas, settings["eps"])
    return torch.optim.SGD(
        [weights], settings["lr"], settings["momentum"], nesterov=name == "nesterov"
    )
