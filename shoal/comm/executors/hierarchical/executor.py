"""Collectives over several hosts: shared memory inside a host, TCP between hosts.

Collectives run one after the other on a work queue; `collectives` has the steps of each. Where
nothing is combined or copied for many (gather, scatter, all_to_all) every piece goes straight to
its rank as a message.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.call import Call, as_reduced
from shoal.comm.executor import Executor
from shoal.comm.executors.hierarchical import point_to_point
from shoal.comm.executors.hierarchical.collectives import HierarchicalCollectives
from shoal.comm.executors.hierarchical.tcp_links import TcpLinks
from shoal.comm.executors.hierarchical.topology import Topology
from shoal.comm.executors.shared_memory import SharedMemory
from shoal.comm.executors.torch import combine_rows
from shoal.comm.group import Group
from shoal.comm.staging import FlatTensor, check_counts, counts_row, counts_table, on_host, widened
from shoal.comm.work_queue import QueuedWork, WorkQueue
from shoal.errors import ShoalError
from shoal.runtime.waits import waiting
from shoal.transport.transport import as_shoal_error

_TAGS = 1 << 28  # reserved tags from here on
_BY_MESSAGES = ("gather", "scatter", "all_to_all", "all_to_all_uneven")


class Steps(NamedTuple):
    """`run` communicates, on the work queue; then `store` brings the result to the caller."""

    run: Callable[[], None]
    store: Callable[[], None]


def _divided(
    buffer: FlatTensor | None, counts: tuple[int, ...], size: int, only: int | None
) -> dict[int, Tensor]:
    """A piece for each rank, or everything for `only`."""
    if buffer is None:
        return {}
    if only is not None:
        return {only: buffer.flat}
    return dict(enumerate(torch.split(buffer.flat, list(counts)) if counts else buffer.rows(size)))


def steps_of(call: Call, collectives: HierarchicalCollectives, rank: int, size: int) -> Steps:
    """The tensors of the call as flat ones; inputs that the steps would change are copied."""
    if call.kind == "barrier":
        return Steps(collectives.barrier, _nothing)
    assert call.data is not None and call.out is not None
    if call.kind == "broadcast":
        target = on_host(call.data)
        return Steps(lambda: collectives.broadcast(target.flat, call.root), target.store)
    source = on_host(call.data, copy=call.kind in ("all_gather", "reduce", "reduce_scatter"))
    target = source if call.out is call.data else on_host(call.out)
    if call.kind == "all_gather":
        rows = target.rows(size)
        return Steps(lambda: collectives.all_gather(rows, source.flat), target.store)
    if call.kind in ("scan", "exclusive_scan"):
        everything = source.flat.new_empty(size, source.flat.numel())
        last = rank + (call.kind == "scan")

        def scan() -> None:
            collectives.all_gather(everything, source.flat)
            combine_rows(target.flat, everything[:last], call.op)

        return Steps(scan, target.store)
    numbers, op = as_reduced(source.flat, call.op)
    if call.kind == "reduce":
        store = source.store if rank == call.root else _nothing
        return Steps(lambda: collectives.reduce(numbers, call.root, op), store)
    into, _ = as_reduced(target.flat, call.op)
    if call.kind == "reduce_scatter":
        rows = numbers.view(size, into.numel())
        return Steps(lambda: collectives.reduce_scatter(into, rows, op), target.store)
    if target is not source:
        into.copy_(numbers)
    return Steps(lambda: collectives.all_reduce(into, op), target.store)


def _nothing() -> None:
    return None


_CLOSE_TIMEOUT_S = 1.0


class Hierarchical(Executor):
    """Made on all ranks together; `shared_memory` are the ranks of this host.

    `links` are the connections between hosts.
    """

    any_source = True
    topology: Topology

    def __init__(
        self, topology: Topology, shared_memory: SharedMemory, links: TcpLinks, timeout_s: float
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
        self._messages = point_to_point.PointToPoint(topology, shared_memory, links.mesh())
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
        self._messages.mesh.timeout_s = timeout_s
        if self._inter_host is not None:
            self._inter_host.set_timeout(timeout_s)

    # ------------------------------------------------------------------ operations

    def send(self, data: Tensor, dst: int, tag: int) -> point_to_point.Message:
        self._check_open()
        return self._messages.send(data, dst, tag)

    def recv(self, into: Tensor, src: int, tag: int) -> point_to_point.Message:
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
        if call.kind in _BY_MESSAGES:
            return self._by_messages(call, number, collectives)
        wide, store_wide = widened(call, self.rank)
        run, store = steps_of(wide, collectives, self.rank, self.size)

        def store_both() -> None:
            store()
            store_wide()

        return Steps(run, store_both)

    def _by_messages(self, call: Call, number: int, collectives: HierarchicalCollectives) -> Steps:
        """Every piece goes straight to its rank."""
        source = None if call.data is None else on_host(call.data, copy=True)
        target = None if call.out is None else on_host(call.out)
        to, by = (call.root if call.kind == kind else None for kind in ("gather", "scatter"))
        given = _divided(source, call.send_counts, self.size, to)
        taken = _divided(target, call.recv_counts, self.size, by)
        limit_s = self._timeout_s if call.timeout_s is None else call.timeout_s
        tag = point_to_point.reserved_tag(_TAGS + number % _TAGS)

        def exchange() -> None:
            if call.kind == "all_to_all_uneven":
                counts = counts_table(self.size)
                collectives.all_gather(counts, counts_row(call))
                check_counts(counts)  # raises on all ranks
            others = [peer for peer in range(self.size) if peer != self.rank]
            comes = [p for p in others if p in taken and taken[p].numel()]
            goes = [p for p in others if p in given and given[p].numel()]
            messages = [
                *(self._messages.recv(taken[peer], peer, tag) for peer in comes),
                *(self._messages.send(given[peer], peer, tag) for peer in goes),
            ]
            if self.rank in taken:
                taken[self.rank].copy_(given[self.rank])
            for message in messages:
                message.wait(limit_s)

        return Steps(exchange, _nothing if target is None else target.store)

    def describe(self, call: Call) -> str:
        return f"{call.kind} over hosts {call.num_bytes} bytes"

    def record_times(self) -> None:
        self.queue.timed = True

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
            failure = point_to_point.with_global_ranks(error, self.topology, doing)
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
        indices = [local.index(rank) for rank in here]
        # all ranks of the host call it where one of them is in the new group
        shared_memory = self.shared_memory.split(indices) if indices else None
        if shared_memory is None or len(here) == len(ranks):
            return shared_memory
        topology = self.topology.of_subset(ranks)
        links = self._links.subset(name, topology, ranks)
        child = Hierarchical(topology, shared_memory, links, self._timeout_s)
        self._children.append(child)
        return child

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
