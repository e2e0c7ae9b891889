"""How long the modules of a model take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.replica.engine import call, keeping_modes, own_random_streams

_ROUNDS = 3


@torch.no_grad()
def module_seconds(model: nn.Module, inputs: Any, device: torch.device) -> dict[str, float]:
    """The time of every module's forward, those inside it included; the best of a few rounds.

    The model evaluates, so that it keeps nothing of it.
    """
    best: dict[str, float] = {}
    with keeping_modes(model), own_random_streams(device):
        model.eval()
        for _ in range(_ROUNDS):
            with _timing(model, device) as found:
                call(model, inputs)
            for name, seconds in found.items():
                best[name] = min(seconds, best.get(name, seconds))
    return best


@contextmanager
def _timing(model: nn.Module, device: torch.device) -> Iterator[dict[str, float]]:
    found: dict[str, float] = {}
    began: dict[str, list[float]] = {}
    hooks = []

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def watch(name: str, module: nn.Module) -> None:
        def begin(*_: Any) -> None:
            began.setdefault(name, []).append(now())

        def end(*_: Any) -> None:
            found[name] = found.get(name, 0.0) + now() - began[name].pop()

        hooks.append(module.register_forward_pre_hook(begin))
        hooks.append(module.register_forward_hook(end))

    for name, module in model.named_modules():
        watch(name, module)
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def as_tensor(model: nn.Module, seconds: dict[str, float]) -> Tensor:
    """By the order of the model's modules, for sending; what was not called takes no time."""
    names = [name for name, _ in model.named_modules()]
    return torch.tensor([seconds.get(name, 0.0) for name in names], dtype=torch.float64)


def by_name(model: nn.Module, seconds: Tensor) -> dict[str, float]:
    names = [name for name, _ in model.named_modules()]
    return dict(zip(names, seconds.tolist(), strict=True))
