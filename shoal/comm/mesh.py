"""Workers as a grid with named axes.

    rank = (dp * pp.size + pp) * tp.size + tp

    ddp + pp(2) + tp(2) on 8:    replica 0    stage 0: 0 1    stage 1: 2 3
                                 replica 1    stage 0: 4 5    stage 1: 6 7

tp is innermost, since its ranks exchange the most and should share a host; replicas are outermost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.comm.executors.solo import SoloGroup
from shoal.comm.group import Group
from shoal.strategy.strategy import Layout


@dataclass(frozen=True)
class Mesh:
    """A rank's group on every axis; an axis of one rank is a `SoloGroup`."""

    world: Group
    dp: Group
    pp: Group
    tp: Group

    @classmethod
    def of(cls, world: Group, layout: Layout) -> Mesh:
        """All ranks call it: every axis is cut into groups, the same ones in the same order."""
        dp, pp, tp = axes(layout)
        return cls(world, _own(world, dp), _own(world, pp), _own(world, tp))


Lines = list[list[int]]


def axes(layout: Layout) -> tuple[Lines, Lines, Lines]:
    """The ranks of every line of the grid along dp, along pp and along tp."""
    replicas = range(layout.replicas)
    pp = range(layout.pp)
    tp = range(layout.tp)

    def rank(d: int, p: int, t: int) -> int:
        return (d * layout.pp + p) * layout.tp + t

    return (
        [[rank(d, p, t) for d in replicas] for p in pp for t in tp],
        [[rank(d, p, t) for p in pp] for d in replicas for t in tp],
        [[rank(d, p, t) for t in tp] for d in replicas for p in pp],
    )


def _own(world: Group, lines: Sequence[Sequence[int]]) -> Group:
    """The group of the line that this rank is on."""
    if len(lines[0]) == 1:
        return SoloGroup()
    if len(lines) == 1:
        return world
    groups = [world.subgroup(line) for line in lines]
    return next(group for group in groups if group is not None)
