"""A group whose ranks change: lost ones leave it, and others are added, between two steps.

Before it was formed for the first time, each worker is alone in it. So a worker builds its model
and its optimizer without waiting for others, whether it comes at the start or late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.comm.executor import Executor
from shoal.comm.executors.hierarchical.topology import Topology
from shoal.comm.executors.solo import Solo
from shoal.comm.group import Group
from shoal.comm.network import HostNetwork, hosts_of, join_hosts, share_on_hosts
from shoal.comm.transport.shm.memfd import Exchange
from shoal.comm.transport.shm.segment import NOT_BUILT, is_built
from shoal.errors import PeerLost, ShoalError

if TYPE_CHECKING:
    from shoal.comm.executors.elastic_nccl import ElasticNccl
    from shoal.comm.members.board import GroupMember
    from shoal.comm.members.membership import Generation, GroupMembership
    from shoal.comm.transport.tcp.transport import TcpEngine


class ElasticGroup(Group):
    """Also the groups that were duplicated from it change with it."""

    def __init__(
        self,
        membership: GroupMembership,
        timeout_s: float,
        hosts: HostNetwork | None = None,
        nccl_store: Path | None = None,
    ):
        """`hosts`: its members are on several. `nccl_store`: each has a GPU, files are made so."""
        alone = Solo()
        alone.few_large = alone.in_order = nccl_store is not None
        super().__init__(alone)
        self._nccl_store = nccl_store
        self._nccl: ElasticNccl | None = None
        self.membership = membership
        self._hosts = hosts
        self._connecting = threading.Lock()
        self._engine: TcpEngine | None = None  # between hosts
        self._formed: tuple[GroupMember, ...] = ()
        self.wrap: Callable[[Executor], Executor] = lambda executor: executor
        self._timeout_of_operations_s = timeout_s
        self._copies: list[Group] = []
        self._could_not_share: tuple[GroupMember, ...] = ()
        membership.board.watch(self._lose)

    @property
    def has_formed(self) -> bool:
        return self.membership.generation.number > 0

    def duplicate(self) -> Group:
        copy = super().duplicate()
        self._copies.append(copy)
        return copy

    def regroup(self, admits: bool, can_send: bool = True) -> None:
        """Leave the group, and return in the next one: see `GroupMembership.regroup`.

        Members that wait for this one get a PeerLost, and come as well.
        """
        self._connected((), None)
        if self._nccl is not None:
            self._nccl.abandon()
            self._nccl = None
        self.executor.close()
        executor = self.wrap(self.membership.regroup(admits, can_send, self._form))
        self.bind(executor)
        for copy in self._copies:
            split = executor.split(range(executor.size))
            assert split is not None
            copy.bind(split)

    def close(self) -> None:
        self._connected((), None)
        super().close()
        self.membership.board.close()

    def _form(self, generation: Generation, exchange: Exchange) -> Executor:
        members = generation.members
        size = len(members)
        if size == 1:
            return Solo()
        rank = members.index(self.membership.me)
        hosts = self._hosts
        topology = Topology((tuple(range(size)),), rank)
        if hosts is not None:
            topology = hosts_of(hosts, exchange, rank)
        limit_s = self._timeout_of_operations_s
        local = share_on_hosts(topology, exchange, limit_s, explains=False)
        if local is None:
            raise self._not_shared(members)
        if self._nccl_store is not None:
            return self._over_nccl(generation, local, limit_s)
        if hosts is None:
            return local
        # every wait ends when the board tells of a loss
        return join_hosts(
            topology,
            local,
            exchange,
            limit_s,
            hosts,
            self.membership.check_forming,
            partial(self._connected, members),
        )

    def _over_nccl(self, generation: Generation, host: Executor, limit_s: float) -> Executor:
        from torch._C._distributed_c10d import FileStore

        from shoal.comm.executors.elastic_nccl import ElasticNccl

        store = FileStore(f"{self._nccl_store}-{generation.number}", host.size)
        self._nccl = ElasticNccl(host, store, limit_s)
        return self._nccl

    def _connected(self, members: tuple[GroupMember, ...], engine: TcpEngine | None) -> None:
        with self._connecting:
            self._formed = members
            self._engine = engine

    def _lose(self, member: GroupMember) -> None:
        """From a thread: a process has exited, or its host is silent, or this one is cut off."""
        with self._connecting:
            engine = self._engine
            formed = self._formed
            if engine is None or member not in formed:
                return
            is_own = member == self.membership.me
            for rank, other in enumerate(formed):
                if is_own or other == member:
                    engine.lose(rank)

    def _not_shared(self, members: tuple[GroupMember, ...]) -> ShoalError:
        """One of them may have been lost meanwhile; the same ones a second time cannot."""
        if members != self._could_not_share and is_built():
            self._could_not_share = members
            return PeerLost(self.membership.me.worker, None, "sharing memory")
        why = "these workers cannot share memory" if is_built() else NOT_BUILT
        return ShoalError(f"an elastic group is one of shared memory: {why}")
