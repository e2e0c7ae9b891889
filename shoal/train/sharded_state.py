"""What workers of an elastic run do about their state, where each of them holds shards of it.

    compare    which steps are done, and for which group the shards are that each worker holds
    settle     end the update, or the change of shards, that others have ended; else undo it
    stage      get the shards of the present group; newcomers also get what is not sharded
    barrier    all have staged
    swap       hold these shards alone

A worker may be lost at any of these moments: then they begin again, with the next generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shoal.comm.members.elastic_group import ElasticGroup
from shoal.comm.objects import all_gather_object, broadcast_object
from shoal.errors import RunOver
from shoal.sync.movable_shards import MovableShards, ShardProgress, settled
from shoal.train.job_state import JobState
from shoal.train.step.step import Step


class Interrupted(NamedTuple):
    """A step that a loss has interrupted, and the buffers of its model before it."""

    step: Step
    buffers: Sequence[Tensor]


class ShardedState:
    """One worker's side."""

    def __init__(self, group: ElasticGroup, state: JobState):
        self._group = group
        self._steps = state.models
        self._state = state
        self._unsharded: dict[str, Any] | None = None  # staged in a newcomer
        self.interrupted: Interrupted | None = None
        self.is_new = True
        self._has_ended_step = False  # which the script has not returned from

    @property
    def is_open(self) -> bool:
        """Whether the script may be inside of a step whose update is done.

        What it does after that, such as to update an average, a newcomer would not get.
        """
        is_updating = any(shards.is_prepared for shards in self._shards)
        is_updated = any(step.update.steps > step.steps for step in self._steps)
        return self._has_ended_step or is_updating or is_updated

    def end_step(self) -> None:
        """The script goes on after its step."""
        self._has_ended_step = False

    def share(self) -> None:
        """All workers call it; PeerLost where it has to begin again."""
        rows = self._compare()
        self._settle(rows)
        rows = [settled(row) for row in rows]
        self._stage(rows)
        self._group.barrier().wait()
        self._swap()

    def _compare(self) -> list[list[ShardProgress]]:
        """For each model how far each rank is."""
        is_open = self.is_open
        mine = [s.progress(self.is_new)._replace(is_open=is_open) for s in self._shards]
        by_rank = all_gather_object(self._group, [tuple(progress) for progress in mine])
        rows = [[ShardProgress(*row) for row in ranks] for ranks in zip(*by_rank, strict=True)]
        if all(progress.is_new for progress in rows[0]):
            if self._group.membership.has_begun:
                raise RunOver(self._group.membership.me.worker)
            for row in rows:  # all start from what the first one has
                row[0] = row[0]._replace(is_new=False)
        return rows

    def _settle(self, rows: Sequence[Sequence[ShardProgress]]) -> None:
        rank = self._group.rank
        for shards, row in zip(self._shards, rows, strict=True):
            shards.settle(row, rank)
        if self.is_new and not settled(rows[0])[rank].is_new and rows[0][rank].is_new:
            self._take_unsharded()
        for step in self._steps:
            if not self.is_new and step.update.steps > step.steps:
                step.end_interrupted()
                self._has_ended_step = True
            elif self.interrupted is not None and self.interrupted.step is step:
                step.abandon(self.interrupted.buffers)
        self.interrupted = None

    def _stage(self, rows: Sequence[Sequence[ShardProgress]]) -> None:
        group = self._group
        newcomers = [progress.is_new for progress in rows[0]]
        if any(newcomers):
            source = _sender(rows[0])
            mine = self._state.pack_unsharded() if group.rank == source else {}
            received = broadcast_object(group, mine, source)
            self._unsharded = received if newcomers[group.rank] else None
        for shards, row in zip(self._shards, rows, strict=True):
            shards.stage(row, group, group.membership.generation.number)

    def _swap(self) -> None:
        for shards in self._shards:
            shards.swap()
        if self.is_new:
            self._take_unsharded()

    def _take_unsharded(self) -> None:
        self.is_new = False
        if self._unsharded is not None:  # else this is the worker that the others start from
            self._state.unpack_unsharded(self._unsharded)
            self._unsharded = None

    @property
    def _shards(self) -> list[MovableShards]:
        return [step.sync.movable for step in self._steps if step.sync.movable is not None]


def _sender(rows: Sequence[ShardProgress]) -> int:
    """The rank that newcomers get from what is not sharded.

    One that is between two steps, as long as there is one: it may be lost after they were admitted.
    """
    trained = [rank for rank, row in enumerate(rows) if not row.is_new]
    return next((rank for rank in trained if not rows[rank].is_open), trained[0])
