"""How the groups of an axis lie on nodes, or on racks: which of their ranks share one.

Groups are ranks f, f + stride, …; all ranks of the cluster are in one. Where strides and sizes fit
the places all groups lie alike. Else every group is looked at, and the worst one counts: a group
that crosses a border is as slow as its hop there, and all others wait for it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shoal.plan.step.rank_order import RankGroup


class GroupPlaces(NamedTuple):
    inside: int  # the most ranks of one group in one place, of groups that are in several
    is_even: bool  # every group has as many ranks in each place where it has one
    leaving: int  # hops of rings in rank order that leave the busiest place
    leaving_pairs: float  # pairs (rank here, rank of its group elsewhere) of the busiest place

    @property
    def is_apart(self) -> bool:
        """Whether a group is in several places."""
        return self.leaving > 0


@lru_cache(maxsize=100_000)
def group_places(group: RankGroup, devices: int, total: int) -> GroupPlaces:
    """Places of so many devices each; `total` devices in the cluster."""
    size, stride = group
    extent = size * stride
    if devices % extent == 0:
        return GroupPlaces(size, True, 0, 0.0)
    if stride % devices == 0:
        return GroupPlaces(1, True, devices, float(devices * (size - 1)))
    if devices % stride == 0 and extent % devices == 0:
        inside = devices // stride
        return GroupPlaces(inside, True, stride, float(devices * (size - inside)))
    return _looked_at(group, devices, max(total, extent))


def _looked_at(group: RankGroup, devices: int, total: int) -> GroupPlaces:
    size, stride = group
    extent = size * stride
    blocks = min(math.lcm(extent, devices) // extent, max(1, total // extent))
    firsts = (np.arange(blocks)[:, None] * extent + np.arange(stride)).reshape(-1, 1)
    place = (firsts + np.arange(size) * stride) // devices  # of each group's ranks
    leaves = place != np.roll(place, -1, axis=1)
    if not leaves.any():
        return GroupPlaces(size, True, 0, 0.0)
    beside = (place[:, :, None] == place[:, None, :]).sum(axis=2)  # ranks of its group, with it
    apart = leaves.any(axis=1)
    elsewhere = np.bincount(place.ravel(), (size - beside).ravel())
    return GroupPlaces(
        inside=int(beside[apart].max()),
        is_even=bool((beside == beside[0, 0]).all()),
        leaving=int(np.bincount(place[leaves]).max()),
        leaving_pairs=float(elsewhere.max()),
    )
