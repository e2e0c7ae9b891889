"""Split a row of costs so that the most expensive stage is as cheap as possible."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise


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
