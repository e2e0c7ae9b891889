"""Between hosts: what `Hierarchical` needs there, whichever transport carries it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from shoal.comm.call import Op
from shoal.comm.executors.hierarchical.topology import Topology
from shoal.errors import PeerLost


class InterHost(Protocol):
    """Collectives among one rank of each host; rank h here is one rank of host h.

    Flat tensors in the host's memory; every call returns when it is done. `out` of a gather, and
    `data` of a reduce-scatter, have a row for each host.
    """

    def set_timeout(self, timeout_s: float) -> None: ...
    def with_timeout(self, timeout_s: float) -> InterHost: ...
    def close(self) -> None:
        """Ranks that wait for this one get an error at once."""
        ...

    def barrier(self) -> None: ...
    def broadcast(self, data: Tensor, root: int) -> None: ...
    def all_gather(self, out: Tensor, data: Tensor) -> None: ...
    def all_reduce(self, data: Tensor, op: Op) -> None: ...
    def reduce(self, data: Tensor, op: Op, root: int) -> None: ...
    def reduce_scatter(self, out: Tensor, data: Tensor, op: Op) -> None: ...


class HostLinks(Protocol):
    """The connections of one group of ranks on several hosts."""

    def inter_host(self) -> InterHost | None:
        """Among the ranks of `column_of`; None for a rank that is not one of them."""
        ...

    def mesh(self) -> Any:
        """Messages between any two ranks, with the methods of a ProcessGroupGloo."""
        ...

    def subset(self, name: str, topology: Topology, ranks: Sequence[int]) -> HostLinks:
        """For some of the ranks; `name` tells the subsets of a group apart."""
        ...

    def close(self) -> None: ...


class RemotePeerLost(PeerLost):
    """A PeerLost that names ranks of the whole group already."""


def column_of(topology: Topology) -> list[int] | None:
    """The ranks of this one's index on all hosts; if hosts differ in size, the first ones only."""
    if topology.index and not topology.is_even:
        return None
    return [ranks[topology.index] for ranks in topology.hosts]
