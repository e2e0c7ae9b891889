"""Where to cut a row of costs so that the dearest part is as cheap as can be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise


def dearest(costs: Sequence[float], cuts: Sequence[int]) -> float:
    """The largest sum of a part."""
    return max(sum(costs[a:b]) for a, b in pairwise([0, *cuts, len(costs)]))


def cut_evenly(
    costs: Sequence[float],
    places: Sequence[int],
    prices: Sequence[float],
    parts: int,
    slack: float = 0.0,
) -> list[int] | None:
    """`parts - 1` of the `places` (ascending) to cut `costs` at; None if there are too few.

    The largest sum of a part is as small as can be, or by `slack` of it larger; among such cuts
    the sum of their `prices` is the smallest.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    ends = [*places, len(costs)]
    if len(places) < parts - 1:
        return None

    @cache
    def least_top(index: int, left: int) -> float:
        """The largest part of the first `left` ones, which end at `ends[index]`."""
        if left == 1:
            return sums[ends[index]]
        return min(
            max(least_top(before, left - 1), sums[ends[index]] - sums[ends[before]])
            for before in range(left - 2, index)
        )

    limit = least_top(len(ends) - 1, parts) * (1 + slack + 1e-12)

    @cache
    def least_price(index: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return (0.0 if sums[ends[index]] <= limit else float("inf")), ()
        found: tuple[float, tuple[int, ...]] = (float("inf"), ())
        for before in range(left - 2, index):
            if sums[ends[index]] - sums[ends[before]] <= limit:
                price, cuts = least_price(before, left - 1)
                found = min(found, (price + prices[before], (*cuts, ends[before])))
        return found

    return list(least_price(len(ends) - 1, parts)[1])
