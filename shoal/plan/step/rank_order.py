"""Which ranks form the groups of each axis of a strategy.

Shoal's order has tp innermost and replicas outermost: rank = ((replica * pp + stage) * …) * tp + i.
A group of an axis is then a first rank and a stride.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from shoal.strategy.strategy import Layout

SHOAL_ORDER = ("tp", "cp", "ep", "pp", "dp")  # innermost first
MEGATRON_ORDER = ("tp", "cp", "ep", "dp", "pp")


class RankGroup(NamedTuple):
    """Ranks first, first + stride, …; every rank of the cluster is in one such group."""

    size: int
    stride: int


@dataclass(frozen=True)
class RankOrder:
    axes: tuple[str, ...] = SHOAL_ORDER

    def group(self, layout: Layout, axis: str) -> RankGroup:
        sizes = axis_sizes(layout)
        inner = self.axes[: self.axes.index(axis)]
        return RankGroup(sizes[axis], math.prod(sizes[name] for name in inner))


IN_SHOALS_ORDER = RankOrder()
IN_MEGATRONS_ORDER = RankOrder(MEGATRON_ORDER)


def axis_sizes(layout: Layout) -> dict[str, int]:
    return {
        "dp": layout.replicas,
        "pp": layout.pp,
        "tp": layout.tp,
        "ep": layout.ep,
        "cp": layout.cp,
    }
