"""A part of a replica, under rules that do not wait for everybody: one lead for all parts.

    every part    stages its push with servers of its own, which follow the lead of part 0
    gather        all parts of the replica have staged
    part 0        COMMIT to the lead; its verdict, and the place in the log, for all parts
    part 0        PULL from the lead, which holds it back as the rule says
    the others    take weights that are at least as new, and leave out the steps that it does

So a push counts in every part or in none, and every part applies pushes in the same order. Parts
may have different versions in a step; what several of them hold is the same on all: the first
one's (`ReplicaShard.synchronize_copies`).
"""

from __future__ import annotations

from typing import get_args, get_type_hints

from torch import Tensor

from shoal.errors import ShoalError
from shoal.server.client import PullResult
from shoal.server.protocol.messages import Ack, Commit
from shoal.sync.ps.worker import ParameterServer

_VERDICTS = get_args(get_type_hints(Ack)["verdict"])


class ServedPart(ParameterServer):
    """One worker of a replica that is split."""

    whose = "replica"
    may_pull_ahead = False  # the others learn in `begin` what part 0 has got
    _in_step = False

    def begin(self) -> None:
        self._in_step = True
        super().begin()

    def finish(self) -> None:
        super().finish()
        self._in_step = False

    def skip(self) -> Tensor:
        self._in_step = False
        return super().skip()

    def _decide(self, commit: Commit, heads: Tensor) -> Ack:
        self.client.stage(commit, heads)
        self.replica_group.barrier()
        said = [0, 0]
        if self.replica_group.is_leader:
            ack = self.client.decide(commit, heads)
            said = [_VERDICTS.index(ack.verdict), ack.position]
        verdict, position = self.replica_group.broadcast_integers(said)
        return Ack(_VERDICTS[verdict], position)

    def _ask(self, step: int | None, version: int) -> None:
        if self.replica_group.is_leader:
            super()._ask(step, version)
        self._asked = True

    def _await_pull(self) -> PullResult:
        said = [0, 0, 0]
        if self.replica_group.is_leader:
            mine = super()._await_pull()
            said = [mine.version, mine.slowest or 0, mine.fastest or 0]
        version, slowest, fastest = self.replica_group.broadcast_integers(said)
        if not self.replica_group.is_leader:
            self._pulling = self.client.pull(None, version)
            mine = super()._await_pull()
        return PullResult(version, slowest, fastest, mine.head)

    def _meet(self) -> None:
        self.replica_group.barrier()
        if self.replica_group.is_leader:
            super()._meet()
        (self.lowest_survivor,) = self.replica_group.broadcast_integers([self.lowest_survivor])

    def _end(self) -> None:
        if self._in_step:
            raise ShoalError("a step has failed, and the others of this replica may not come")
        super()._end()

    def _leave(self) -> None:
        """Part 0 leaves last: its servers tell the others what was decided."""
        if self.replica_group.is_leader:
            self.replica_group.barrier()
        super()._leave()
        if not self.replica_group.is_leader:
            self.replica_group.barrier()
