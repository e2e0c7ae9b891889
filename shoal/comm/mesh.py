"""Workers as a grid with named axes, and the workers of one replica.

    rank = (dp * pp.size + pp) * tp.size + tp

    ddp + pp(2) + tp(2) on 8:    replica 0    stage 0: 0 1    stage 1: 2 3
                                 replica 1    stage 0: 4 5    stage 1: 6 7

tp is innermost, since its ranks exchange the most and should share a host; replicas are outermost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.comm.objects import broadcast_bytes
from shoal.strategy.strategy import Layout


@dataclass(frozen=True)
class Mesh:
    """A rank's group on every axis; an axis of one rank is a group of this rank alone."""

    world: Group
    dp: Group
    pp: Group
    tp: Group

    @property
    def replica_group(self) -> ReplicaGroup:
        """The workers of this rank's replica."""
        return ReplicaGroup(self.pp, self.tp)

    @classmethod
    def of(cls, world: Group, layout: Layout) -> Mesh:
        """All ranks call it: they make the groups of every axis in the same order."""
        dp, pp, tp = axes(layout)
        return cls(world, _group_of(world, dp), _group_of(world, pp), _group_of(world, tp))


class ReplicaGroup:
    """The tp × pp workers of one replica, numbered stage by stage; rank 0 is their leader.

        pp(2) + tp(2)    stage 0: ranks 0 1    stage 1: ranks 2 3

    All of them call its methods in the same order.
    """

    def __init__(self, pp: Group | None = None, tp: Group | None = None):
        """Without groups, one worker is the whole replica."""
        self._pp = pp or solo_group()
        self._tp = tp or solo_group()
        self.rank = self._pp.rank * self._tp.size + self._tp.rank
        self.size = self._pp.size * self._tp.size

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until all workers have called it: along tp, then along pp."""
        self._tp.barrier().wait()
        self._pp.barrier().wait()

    def broadcast(self, data: Tensor) -> None:
        """Replace `data` by the leader's: along pp to each stage, then along tp."""
        if self._tp.rank == 0:
            self._pp.broadcast(data).wait()
        self._tp.broadcast(data).wait()

    def broadcast_bytes(self, data: bytes, max_bytes: int) -> bytes:
        """The leader's bytes."""
        if self._tp.rank == 0:
            data = broadcast_bytes(self._pp, data, 0, max_bytes)
        return broadcast_bytes(self._tp, data, 0, max_bytes)

    def broadcast_integers(self, numbers: Sequence[int]) -> list[int]:
        """The leader's numbers; all workers pass equally many."""
        data = torch.tensor(numbers, dtype=torch.int64)
        self.broadcast(data)
        return [int(number) for number in data]


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


def _group_of(world: Group, lines: Sequence[Sequence[int]]) -> Group:
    """The group of the line that this rank is on."""
    if len(lines[0]) == 1:
        return solo_group()
    if len(lines) == 1:
        return world
    groups = [world.subgroup(line) for line in lines]
    return next(group for group in groups if group is not None)
