"""The group of an elastic run of virtual workers: formed by the board, as that of real ones."""

from __future__ import annotations

import math

from shoal.comm.executor import Executor
from shoal.comm.executors.solo import Solo
from shoal.comm.members.elastic_group import ElasticGroup
from shoal.comm.members.membership import Generation, GroupMembership
from shoal.rehearse.executor import Virtual, VirtualRanks
from shoal.transport.shm.memfd import Exchange


class VirtualElasticGroup(ElasticGroup):
    def __init__(self, membership: GroupMembership, ranks: VirtualRanks):
        super().__init__(membership, math.inf)
        self._ranks = ranks

    def _form(self, generation: Generation, exchange: Exchange) -> Executor:
        """One that is lost from here on has left the group, or has not answered."""
        members = generation.members
        if len(members) == 1:
            return Solo()
        rank = members.index(self.membership.me)
        key = ("generation", generation.number, *members)
        executor = Virtual(self._ranks, [member.worker for member in members], rank, key)
        try:
            exchange(b"there")
        except BaseException:
            executor.close()
            raise
        return executor
