"""Collectives over several hosts: shared memory inside a host, TCP or Gloo between hosts.

Collectives run one after the other on a work queue; `collectives` has the steps of each. Where
nothing is combined or copied for many (gather, scatter, all_to_all) every piece goes straight to
its rank as a message.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from shoal.comm.call import Call
from shoal.comm.executor import Executor
from shoal.comm.executors.hierarchical.any_source import Message
from shoal.comm.executors.hierarchical.collectives import HierarchicalCollectives, HostLinks
from shoal.comm.executors.hierarchical.point_to_point import PointToPoint, with_global_ranks
from shoal.comm.executors.hierarchical.steps import (
    PieceExchange,
    Steps,
    agree_about_counts,
    exchange_of,
    steps_of,
)
from shoal.comm.executors.hierarchical.topology import Topology
from shoal.comm.executors.shared_memory import SharedMemory
from shoal.comm.executors.torch import as_shoal_error
from shoal.comm.group import Group
from shoal.comm.work_queue import QueuedWork, WorkQueue
from shoal.errors import ShoalError
from shoal.runtime.waits import waiting

_CLOSE_TIMEOUT_S = 1.0


class Hierarchical(Executor):
    """Made on all ranks together; `shared_memory` are the ranks of this host.

    `links` are the connections between hosts.
    """

    any_source = True

    def __init__(
        self, topology: Topology, shared_memory: SharedMemory, links: HostLinks, timeout_s: float
    ):
        self.topology = topology
        self.shared_memory = shared_memory
        self.rank = topology.rank
        self.size = topology.size
        self._links = links
        self._timeout_s = timeout_s
        self._inter_host = links.inter_host()
        self._collectives = HierarchicalCollectives(
            topology, Group(shared_memory), self._inter_host
        )
        self._messages = PointToPoint(topology, shared_memory, links.mesh())
        self._calls = itertools.count(1)
        self._failures = list[Exception]()
        self._children: list[Hierarchical] = []
        self._splits = itertools.count()
        self.queue = WorkQueue("shoal collectives over hosts")

    @property
    def timeout_s(self) -> float:
        """How long an operation waits for the other ranks."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.shared_memory.timeout_s = timeout_s
        self._messages.set_timeout(timeout_s)
        if self._inter_host is not None:
            self._inter_host.set_timeout(timeout_s)

    # ------------------------------------------------------------------ operations

    def send(self, data: Tensor, dst: int, tag: int) -> Message:
        self._check_open()
        return self._messages.send(data, dst, tag)

    def recv(self, into: Tensor, src: int, tag: int) -> Message:
        self._check_open()
        return self._messages.recv(into, src, tag)

    def submit(self, call: Call) -> QueuedWork:
        self._check_open()
        number = next(self._calls)
        steps = self._steps(call, number)
        doing = f"{call.kind} #{number} over {len(self.topology.hosts)} hosts"
        return self.queue.call(lambda: self._run(steps, doing))

    def _steps(self, call: Call, number: int) -> Steps:
        collectives = self._collectives
        if call.timeout_s is not None:
            collectives = collectives.with_timeout(call.timeout_s)
        exchange = exchange_of(call, self.rank, self.size)
        if exchange is None:
            return steps_of(call, collectives, self.rank, self.size)
        limit_s = self._timeout_s if call.timeout_s is None else call.timeout_s

        def run() -> None:
            if call.kind == "all_to_all_uneven":
                agree_about_counts(call, collectives, self.size)
            self._exchange(exchange, number, limit_s)

        return Steps(run, exchange.store)

    def describe(self, call: Call) -> str:
        return f"{call.kind} over hosts {call.num_bytes} bytes"

    def record_times(self) -> None:
        self.queue.timed = True

    def _exchange(self, exchange: PieceExchange, number: int, limit_s: float) -> None:
        messages = [
            *(self._messages.recv(t, peer, exchange.tag(number)) for peer, t in exchange.receives),
            *(self._messages.send(t, peer, exchange.tag(number)) for peer, t in exchange.sends),
        ]
        exchange.copy_own()
        for message in messages:
            message.wait(limit_s)

    def _run(self, steps: Steps, doing: str) -> None:
        try:
            self._check_open()
            with waiting(f"rank {self.rank}", "ranks of other hosts", doing):
                steps.run()
        except RuntimeError as error:
            raise self._failed(error, doing) from error
        steps.store()

    def _failed(self, error: RuntimeError, doing: str) -> Exception:
        """The group ends with its first failure, so that no rank waits for this one in vain."""
        failure: Exception
        if isinstance(error, ShoalError):
            failure = with_global_ranks(error, self.topology, doing)
        else:
            failure = as_shoal_error(error, self.rank, doing)
        self._failures.append(failure)
        self._disconnect()
        return failure

    def _check_open(self) -> None:
        if self._failures:
            raise self._failures[0]

    # ------------------------------------------------------------------ the life of a group

    def split(self, ranks: Sequence[int]) -> Executor | None:
        """Shared memory where all ranks are on one host; otherwise hierarchical again."""
        name = f"split {next(self._splits)}"
        local = self.topology.local
        here = [rank for rank in ranks if rank in local]
        shared_memory = self._split_host(here)
        if shared_memory is None or len(here) == len(ranks):
            return shared_memory
        topology = self.topology.of_subset(ranks)
        links = self._links.subset(name, topology, ranks)
        child = Hierarchical(topology, shared_memory, links, self._timeout_s)
        self._children.append(child)
        return child

    def _split_host(self, ranks: Sequence[int]) -> SharedMemory | None:
        """All ranks of the host call it where one of them is in the new group."""
        indices = [self.topology.local.index(rank) for rank in ranks]
        return self.shared_memory.split(indices) if indices else None

    def close(self) -> None:
        for child in self._children:
            child.close()
        self._disconnect()
        self.queue.close(_CLOSE_TIMEOUT_S)
        self._links.close()
        self.shared_memory.close()
        self._failures.append(ShoalError(f"rank {self.rank} has closed this group"))

    def _disconnect(self) -> None:
        """Ranks that wait for this one, on this host or others, get an error at once."""
        if not self.shared_memory.segment.closed:
            self.shared_memory.segment.leave()
        if self._inter_host is not None:
            self._inter_host.close()
        self._messages.close()
