"""Between hosts over Shoal's own TCP transport: schedules among one rank of each host, messages.

Long vectors go around a ring, whose order is that of the hosts; both directions of a link are
used at once. Where racks are known, they are summed up inside each rack first, then between racks.
Short ones go by the algorithm with the fewest rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from shoal.comm.call import Call
from shoal.comm.executors.hierarchical.topology import RemotePeerLost, Topology
from shoal.comm.executors.scheduled import Algorithm, Scheduled
from shoal.comm.transport.tcp.transport import TcpEngine, TcpTransport
from shoal.errors import PeerLost
from shoal.schedules.collectives.cost import Link
from shoal.schedules.collectives.hierarchical import hierarchical_all_reduce
from shoal.schedules.collectives.ring import ring_all_reduce

LONG_BYTES = 1 << 19
_RING = {"all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "ring"}
LINK = Link(60e-6, 8e-9, 1e-10)  # a network of 1 Gb/s; it decides between few rounds and few bytes


class TcpInterHost:
    """Collectives among one rank of each host; rank h here is one rank of host h.

    Flat tensors in the host's memory. `out` of a gather, and `data` of a reduce-scatter, have a
    row for each host.
    """

    def __init__(self, transport: TcpTransport, ring: TcpTransport, rack: int | None = None):
        """`rack` hosts are in a rack, one rack after the other; None: one rack, or not known."""
        self._transports = (transport, ring)
        self._short = Scheduled(transport, link=LINK)
        self._long = Scheduled(ring, _algorithms(rack), link=LINK)
        self.labels = list(range(transport.size))  # the ranks of the group, for errors

    def set_timeout(self, timeout_s: float) -> None:
        for transport in self._transports:
            transport.timeout_s = timeout_s

    def close(self) -> None:
        """Ranks that wait for this one get an error at once."""
        for transport in self._transports:
            transport.abort()

    def run(self, call: Call) -> None:
        executor = self._long if call.num_bytes >= LONG_BYTES else self._short
        with self._limited(call.timeout_s):
            try:
                executor.submit(call._replace(timeout_s=None)).wait()
            except PeerLost as lost:
                peer = None if lost.peer is None else self.labels[lost.peer]
                rank = self.labels[lost.rank]
                raise RemotePeerLost(rank, peer, lost.doing, lost.after_s) from lost

    @contextmanager
    def _limited(self, timeout_s: float | None) -> Iterator[None]:
        """Calls run one after the other, so the limit of one call may be that of the transport."""
        before_s = self._transports[0].timeout_s
        if timeout_s:
            self.set_timeout(timeout_s)
        try:
            yield
        finally:
            self.set_timeout(before_s)


@dataclass(eq=False)
class TcpLinks:
    """One engine for a group and all its subsets."""

    _engine: TcpEngine
    _topology: Topology
    _timeout_s: float
    _ranks: Sequence[int] = ()  # of the engine; default: all
    _name: str = ""

    def __post_init__(self) -> None:
        self._ranks = self._ranks or range(self._engine.size)

    def inter_host(self) -> TcpInterHost | None:
        """Among the ranks of `column`; None for a rank that is not one of them."""
        column = self._topology.column
        if column is None:
            return None
        index = self._topology.index
        made = TcpInterHost(
            self._transport(column, f"column {index}"),
            self._transport(column, f"ring {index}"),
            self._topology.hosts_per_rack,
        )
        made.labels = column
        return made

    def mesh(self) -> TcpTransport:
        """Messages between any two ranks."""
        return self._transport(range(len(self._ranks)), "mesh")

    def subset(self, name: str, topology: Topology, ranks: Sequence[int]) -> TcpLinks:
        """For some of the ranks; `name` tells the subsets of a group apart."""
        chosen = [self._ranks[rank] for rank in ranks]
        return TcpLinks(self._engine, topology, self._timeout_s, chosen, f"{self._name}/{name}")

    def close(self) -> None:
        """The connections are those of the group from which subsets were split."""
        if not self._name:
            self._engine.close()

    def _transport(self, ranks: Sequence[int], use: str) -> TcpTransport:
        chosen = [self._ranks[rank] for rank in ranks]
        space = f"{self._name}|{use}"
        return TcpTransport(self._engine, chosen, space, self._timeout_s)


def _algorithms(rack: int | None) -> dict[str, Algorithm]:
    if rack is None:
        return dict(_RING)
    levels = partial(hierarchical_all_reduce, node=rack, outer=ring_all_reduce)
    return {**_RING, "all_reduce": levels}
