"""Split a row of costs so that the most expensive stage is as cheap as possible."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.pytree import Tree, map_tensors
from shoal.replica.microbatch import call_model, fork_rng, preserve_modes
from shoal.strategy.split_terms import Pp


def largest_cost(costs: Sequence[float], split_points: Sequence[int]) -> float:
    """The largest sum of a stage."""
    return max(sum(costs[a:b]) for a, b in pairwise([0, *split_points, len(costs)]))


def balanced_split(
    costs: Sequence[float],
    candidates: Sequence[int],
    prices: Sequence[float],
    stages: int,
    slack: float = 0.0,
) -> list[int] | None:
    """`stages - 1` of the `candidates` (ascending) to split `costs` at; None if there are too few.

    The largest sum of a stage is as small as possible, or larger by at most `slack` of it. Among
    such splits the sum of their `prices` is the smallest.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    ends = [*candidates, len(costs)]
    if len(candidates) < stages - 1:
        return None

    @cache
    def least_maximum(index: int, count: int) -> float:
        """The largest of the first `count` stages, which end at `ends[index]`."""
        if count == 1:
            return sums[ends[index]]
        return min(
            max(least_maximum(before, count - 1), sums[ends[index]] - sums[ends[before]])
            for before in range(count - 2, index)
        )

    limit = least_maximum(len(ends) - 1, stages) * (1 + slack + 1e-12)

    @cache
    def least_price(index: int, count: int) -> tuple[float, tuple[int, ...]]:
        """The price and split points of the first `count` stages, each within the limit."""
        if count == 1:
            return (0.0 if sums[ends[index]] <= limit else float("inf")), ()
        best: tuple[float, tuple[int, ...]] = (float("inf"), ())
        for before in range(count - 2, index):
            if sums[ends[index]] - sums[ends[before]] <= limit:
                price, split_points = least_price(before, count - 1)
                best = min(best, (price + prices[before], (*split_points, ends[before])))
        return best

    return list(least_price(len(ends) - 1, stages)[1])


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
