"""How members of an elastic group that are on several hosts are joined: memory inside, TCP between.

All of them are on their way to the same generation, and any of them may be lost meanwhile. So every
wait ends when the board says that (`check`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.comm.executor import Executor
from shoal.comm.executors.hierarchical.executor import Hierarchical
from shoal.comm.executors.hierarchical.tcp_links import TcpLinks
from shoal.comm.executors.hierarchical.topology import Topology, host_id
from shoal.comm.executors.shared_memory import SharedMemory
from shoal.comm.network import HostNetwork, in_ring_order, open_engine
from shoal.errors import BadInput
from shoal.runtime.cores import cores
from shoal.transport.shm.memfd import Exchange
from shoal.transport.shm.segment import join
from shoal.transport.tcp.transport import TcpEngine


@dataclass(frozen=True)
class ElasticHosts:
    """What a member knows of its host and of the network."""

    network: HostNetwork
    host_id: str | None

    def check(self) -> None:
        """BadInput where this host cannot take part."""
        if self.network.between != "tcp":
            raise BadInput(
                "an elastic group over several hosts is joined over TCP by the native part, which "
                "is not built or not chosen here: leave out SHOAL_BETWEEN, or install a compiler"
            )

    def form(
        self,
        exchange: Exchange,
        rank: int,
        size: int,
        timeout_s: float,
        check: Callable[[], None],
    ) -> HostsGroup | None:
        """None on all members where those of a host cannot share its memory."""
        topology = Topology.of(exchange(host_id(self.host_id)), rank)
        topology = in_ring_order(topology, self.network, exchange)

        def exchange_on_host(message: bytes) -> list[bytes]:
            """All members call it at once, each for its own host."""
            said = exchange(message)
            return [said[peer] for peer in topology.local]

        num_local = len(topology.local)
        segment = join(exchange_on_host, topology.index, num_local, timeout_s, explains=False)
        if b"no" in exchange(b"no" if segment is None else b"yes") or segment is None:
            if segment is not None:
                segment.close()
            return None
        local = SharedMemory(segment, num_local * torch.get_num_threads() >= cores())
        if len(topology.hosts) == 1:
            return HostsGroup(local, None)
        try:
            engine = open_engine(topology, exchange, timeout_s, self.network, check)
        except BaseException:
            local.close()
            raise
        links = TcpLinks(engine, topology, timeout_s)
        return HostsGroup(Hierarchical(topology, local, links, timeout_s), engine)


@dataclass(frozen=True)
class HostsGroup:
    """The executor of a generation, and its connections, if its members are on several hosts."""

    executor: Executor
    engine: TcpEngine | None
