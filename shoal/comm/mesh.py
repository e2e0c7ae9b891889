"""Workers as a grid with named axes, and the workers of one replica.

    rank = (((dp * pp.size + pp) * ep.size + ep) * cp.size + cp) * tp.size + tp

    ddp + pp(2) + tp(2) on 8:    replica 0    stage 0: 0 1    stage 1: 2 3
                                 replica 1    stage 0: 4 5    stage 1: 6 7

tp is innermost, since its ranks exchange the most and should share a host; replicas are outermost.
Rows of a batch are divided over `data`, which is dp × ep; the ranks of any other axis have the
same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.executors.solo import solo_group
from shoal.comm.group import Group
from shoal.comm.objects import broadcast_bytes
from shoal.strategy.strategy import AXES, Layout


@dataclass(frozen=True)
class Mesh:
    """A rank's group on every axis; an axis of one rank is a group of this rank alone."""

    world: Group
    dp: Group
    pp: Group
    ep: Group
    cp: Group
    tp: Group
    data: Group

    @property
    def replica_group(self) -> ReplicaGroup:
        """The workers of this rank's replica."""
        return ReplicaGroup(self.pp, self.ep, self.cp, self.tp)

    @property
    def stage_group(self) -> ReplicaGroup:
        """The workers of this rank's stage, or of its replica where there is one stage."""
        return ReplicaGroup(self.ep, self.cp, self.tp)

    @classmethod
    def of(cls, world: Group, layout: Layout) -> Mesh:
        """All ranks call it: they make the groups of every axis in the same order."""
        groups = {axis: _group_of(world, layout.lines(axis)) for axis in AXES}
        data = groups["dp"] if layout.ep == 1 else _group_of(world, layout.lines("dp", "ep"))
        return cls(world=world, data=data, **groups)


class ReplicaGroup:
    """The workers of one replica, numbered as in the mesh; rank 0 is their leader.

        pp(2) + tp(2)    stage 0: ranks 0 1    stage 1: ranks 2 3

    All of them call its methods in the same order.
    """

    def __init__(self, *axes: Group):
        """`axes` from the outermost to the innermost; without them one worker is the replica."""
        self._axes = [axis for axis in axes if axis.size > 1]
        self.rank = 0
        self.size = 1
        for axis in self._axes:
            self.rank = self.rank * axis.size + axis.rank
            self.size *= axis.size

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until all workers have called it: along the innermost axis first."""
        for axis in reversed(self._axes):
            axis.barrier().wait()

    def broadcast(self, data: Tensor) -> None:
        """Replace `data` by the leader's: along the outermost axis, then inwards."""
        for axis in self._axes_from_leader():
            axis.broadcast(data).wait()

    def broadcast_bytes(self, data: bytes, max_bytes: int) -> bytes:
        """The leader's bytes."""
        for axis in self._axes_from_leader():
            data = broadcast_bytes(axis, data, 0, max_bytes)
        return data

    def broadcast_integers(self, numbers: Sequence[int]) -> list[int]:
        """The leader's numbers; all workers pass equally many."""
        data = torch.tensor(numbers, dtype=torch.int64)
        self.broadcast(data)
        return [int(number) for number in data]

    def _axes_from_leader(self) -> list[Group]:
        """The axes along which this worker sends or gets what the leader has, in order."""
        return [
            axis
            for index, axis in enumerate(self._axes)
            if all(inner.rank == 0 for inner in self._axes[index + 1 :])
        ]


def _group_of(world: Group, lines: Sequence[Sequence[int]]) -> Group:
    """The group of the line that this rank is on."""
    if len(lines[0]) == 1:
        return solo_group()
    if len(lines) == 1:
        return world
    groups = [world.subgroup(line) for line in lines]
    return next(group for group in groups if group is not None)
