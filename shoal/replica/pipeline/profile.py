"""How long the modules of a model take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.pytree import Tree, map_tensors
from shoal.replica.microbatch import call_model, fork_rng, preserve_modes
from shoal.strategy.split_terms import Pp

_ROUNDS = 3


@torch.no_grad()
def module_seconds(model: nn.Module, inputs: Any, device: torch.device) -> dict[str, float]:
    """The time of every module's forward, those inside it included; the best of a few rounds.

    The model is in evaluation mode, so that it keeps nothing of it.
    """
    best: dict[str, float] = {}
    with preserve_modes(model), fork_rng(device):
        model.eval()
        for _ in range(_ROUNDS):
            with _timing(model, device) as measured:
                call_model(model, inputs)
            for name, seconds in measured.items():
                best[name] = min(seconds, best.get(name, seconds))
    return best


def measured_by_rank_0(
    model: nn.Module, example: Tree, pp: Pp, world: Group, device: torch.device, is_deferred: bool
) -> dict[str, float]:
    """The seconds of modules as rank 0 has measured them, so that all ranks split alike."""
    if is_deferred:
        raise BadInput(f"{pp} measures the model, which has no memory yet: leave balance out")
    if example is None:
        raise BadInput(
            f"{pp} measures the model: give job.step(…, example=inputs) the inputs of a batch"
        )
    seconds = _as_tensor(model, {})
    if world.rank == 0:
        inputs = map_tensors(lambda t: t.to(device), example)
        seconds = _as_tensor(model, module_seconds(model, inputs, device))
    seconds = seconds.to(device)
    world.broadcast(seconds).wait()
    return _by_name(model, seconds)


@contextmanager
def _timing(model: nn.Module, device: torch.device) -> Iterator[dict[str, float]]:
    measured: dict[str, float] = {}
    starts: dict[str, list[float]] = {}
    hooks = []

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def watch(name: str, module: nn.Module) -> None:
        def begin(*_: Any) -> None:
            starts.setdefault(name, []).append(now())

        def end(*_: Any) -> None:
            measured[name] = measured.get(name, 0.0) + now() - starts[name].pop()

        hooks.append(module.register_forward_pre_hook(begin))
        hooks.append(module.register_forward_hook(end))

    for name, module in model.named_modules():
        watch(name, module)
    try:
        yield measured
    finally:
        for hook in hooks:
            hook.remove()


def _as_tensor(model: nn.Module, seconds: dict[str, float]) -> Tensor:
    """By the order of the model's modules, for sending; what was not called takes no time."""
    names = [name for name, _ in model.named_modules()]
    return torch.tensor([seconds.get(name, 0.0) for name in names], dtype=torch.float64)


def _by_name(model: nn.Module, seconds: Tensor) -> dict[str, float]:
    names = [name for name, _ in model.named_modules()]
    return dict(zip(names, seconds.tolist(), strict=True))
