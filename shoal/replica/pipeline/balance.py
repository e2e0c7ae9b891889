"""Split a row of costs so that the most expensive stage is as cheap as possible."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.replica.microbatch_context import call_model, fork_rng, preserve_modes
from shoal.runtime.pytree import Tree, map_tensors
from shoal.runtime.wording import counted
from shoal.strategy.split_terms import Pp

MUCH_CHEAPER = 0.85
_DEEPEST = 3  # levels of blocks to look into
_SLACK = 0.02  # how much more a stage may cost where fewer values cross the split points


class Choice(NamedTuple):
    """Where to split, in which row of operations or modules."""

    cost: float  # of the most expensive stage
    points: list[int]
    row: Any


def best_depth(choose: Callable[[int], Choice]) -> Choice:
    """Between blocks, or inside of them where the most expensive stage gets much cheaper.

    Raises the last refusal of `choose` where there is no other answer.
    """
    best: Choice | None = None
    for deeper in range(_DEEPEST):
        try:
            choice = choose(deeper)
        except BadInput as error:
            refusal = error
            continue
        if best is None or choice.cost < MUCH_CHEAPER * best.cost:
            best = choice
    if best is None:
        raise refusal
    return best


def largest_cost(costs: Sequence[float], split_points: Sequence[int]) -> float:
    """The largest sum of a stage."""
    return max(sum(costs[a:b]) for a, b in pairwise([0, *split_points, len(costs)]))


def balanced_split(
    costs: Sequence[float],
    candidates: Sequence[int],
    prices: Sequence[float],
    stages: int,
    slack: float = _SLACK,
) -> list[int]:
    """`stages - 1` of the `candidates` (ascending) to split `costs` at.

    The largest sum of a stage is as small as possible, or larger by at most `slack` of it. Among
    such splits the sum of their `prices` is the smallest.
    """
    slight = max(1.0, sum(costs)) * 1e-6  # what has no weights takes some time, too
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost + slight)
    ends = [*candidates, len(costs)]
    if len(candidates) < stages - 1:
        raise BadInput(
            f"the model cannot be split into {stages} stages: it has "
            f"{counted(len(candidates) + 1, 'module')} with something to train"
        )

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
    """The time of every module's forward in evaluation mode; the best of a few rounds."""
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
    measured: dict[str, float] = {}
    if world.rank == 0:
        inputs = map_tensors(lambda t: t.to(device), example)
        measured = module_seconds(model, inputs, device)
    names = [name for name, _ in model.named_modules()]
    values = [measured.get(name, 0.0) for name in names]  # what was not called takes no time
    seconds = torch.tensor(values, dtype=torch.float64, device=device)
    world.broadcast(seconds).wait()
    return dict(zip(names, seconds.tolist(), strict=True))


@contextmanager
def _timing(model: nn.Module, device: torch.device) -> Iterator[dict[str, float]]:
    measured: dict[str, float] = {}
    starts: dict[str, list[float]] = {}

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def begin(name: str, *_: Any) -> None:
        starts.setdefault(name, []).append(now())

    def end(name: str, *_: Any) -> None:
        measured[name] = measured.get(name, 0.0) + now() - starts[name].pop()

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(partial(begin, name)).remove)
            hooks.callback(module.register_forward_hook(partial(end, name)).remove)
        yield measured
