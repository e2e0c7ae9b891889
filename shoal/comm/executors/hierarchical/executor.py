"""Collectives over several hosts: shared memory inside a host, TCP between hosts.

Collectives run one after the other on a work queue; `collectives` has the steps of each. Where
nothing is combined or copied for many (gather, scatter, all_to_all) every piece goes straight to
its rank as a message.

Collectives over several hosts: inside each host, between hosts, and inside again.

    all_reduce, long, hosts of equal size L:      n bytes on each of p ranks

        inside    reduce_scatter     every rank has a slice of n/L
        between   all_reduce         of that slice, with the ranks of the same index elsewhere
        inside    all_gather

    short, or hosts of different size: reduce to the first rank of each host, all_reduce among
    these, broadcast inside.

A byte goes from one host to another once, not once for every rank there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.call import Call, Op, as_reduced, divide
from shoal.comm.executor import Executor
from shoal.comm.executors.hierarchical import point_to_point
from shoal.comm.executors.hierarchical.tcp_links import TcpInterHost, TcpLinks
from shoal.comm.executors.hierarchical.topology import Topology
from shoal.comm.executors.shared_memory import SharedMemory
from shoal.comm.executors.torch import combine_rows
from shoal.comm.group import Group
from shoal.comm.staging import FlatTensor, check_counts, counts_row, counts_table, on_host, widened
from shoal.comm.transport.transport import as_shoal_error
from shoal.comm.work_queue import QueuedWork, WorkQueue
from shoal.errors import ShoalError
from shoal.runtime.waits import waiting

_LONG_BYTES = 16384


class HierarchicalCollectives:
    """Flat tensors in the host's memory; every call returns when it is done.

    `local` are the ranks of this host. `inter_host` joins this rank with the ranks of the same
    index on the other hosts; where hosts differ in size, only the first ones have it.
    """

    def __init__(
        self, topology: Topology, local: Group, inter_host: TcpInterHost | None,
        timeout_s: float | None = None,
    ):  # fmt: skip
        self._topology = topology
        self._local = local
        self._inter_host = inter_host
        self._timeout_s = timeout_s  # of a call between hosts
        widest = max(len(ranks) for ranks in topology.hosts)
        grid = [[*ranks, *[-1] * (widest - len(ranks))] for ranks in topology.hosts]
        self._grid = torch.tensor(grid)  # host, index: the rank, or -1

    def with_timeout(self, timeout_s: float) -> HierarchicalCollectives:
        local = self._local.with_timeout(timeout_s)
        return HierarchicalCollectives(self._topology, local, self._inter_host, timeout_s)

    def barrier(self) -> None:
        self._local.barrier().wait()
        if self._topology.index == 0:
            self._between(Call("barrier"))
        self._local.barrier().wait()

    def broadcast(self, data: Tensor, root: int) -> None:
        topology = self._topology
        source = topology.host_of(root)
        root_index = topology.hosts[source].index(root)
        via = root_index if topology.is_even else 0
        if topology.host == source:
            self._local.broadcast(data, root_index).wait()
        if topology.index == via:
            self._between(Call("broadcast", data, data, root=source))
        if topology.host != source:
            self._local.broadcast(data, via).wait()

    def all_reduce(self, data: Tensor, op: Op) -> None:
        if self._local.size == 1 and self._topology.is_even:
            self._between(Call("all_reduce", data, data, _step(op)))
        elif self._topology.is_even and data.nbytes >= _LONG_BYTES:
            self._all_reduce_in_slices(data, _step(op))
        else:
            self._local.reduce(data, 0, _step(op)).wait()
            if self._topology.index == 0:
                self._between(Call("all_reduce", data, data, _step(op)))
            self._local.broadcast(data, 0).wait()
        self._end(data, op)

    def reduce(self, data: Tensor, root: int, op: Op) -> None:
        """`data` is the result at the root only; it is changed on every rank."""
        target = self._topology.host_of(root)
        self._local.reduce(data, 0, _step(op)).wait()
        if self._topology.index == 0:
            self._between(Call("reduce", data, data, _step(op), target))
        if self._topology.host == target:
            self._local.broadcast(data, 0).wait()
            self._end(data, op)

    def all_gather(self, out: Tensor, data: Tensor) -> None:
        """`out` has a row for each rank."""
        hosts, width = self._grid.shape
        if self._topology.is_even:
            column = data.new_empty(hosts, data.numel())
            self._between(Call("all_gather", data, column))
            everything = data.new_empty(width, hosts, data.numel())
            self._local.all_gather(everything, column).wait()
            everything = everything.transpose(0, 1)
        else:
            everything = data.new_empty(hosts, width, data.numel())
            self._gather_by_leaders(everything, data)
        present = self._grid >= 0
        out[self._grid[present]] = everything[present]

    def reduce_scatter(self, out: Tensor, data: Tensor, op: Op) -> None:
        """`data` has a row for each rank."""
        if self._topology.is_even:
            by_index = data[self._grid.t().reshape(-1)]  # by index, then by host
            column = data.new_empty(self._grid.shape[0], out.numel())
            self._local.reduce_scatter(column, by_index, _step(op)).wait()
            self._between(Call("reduce_scatter", column, out, _step(op)))
        else:
            total = data.clone().view(-1)
            self.all_reduce(total, _step(op))
            out.copy_(total.view(data.shape)[self._topology.rank])
        self._end(out, op)

    def _all_reduce_in_slices(self, data: Tensor, op: Op) -> None:
        width = self._local.size
        slice_numel = -(-data.numel() // width)
        is_padded = slice_numel * width != data.numel()
        padded = data.new_zeros(slice_numel * width) if is_padded else data
        if is_padded:
            padded[: data.numel()] = data
        own_slice = data.new_empty(slice_numel)
        self._local.reduce_scatter(own_slice, padded, op).wait()
        self._between(Call("all_reduce", own_slice, own_slice, op))
        self._local.all_gather(padded, own_slice).wait()
        if is_padded:
            data.copy_(padded[: data.numel()])

    def _gather_by_leaders(self, everything: Tensor, data: Tensor) -> None:
        """`everything` is by host and index; hosts are padded to the size of the largest."""
        of_host = data.new_zeros(everything.shape[1:])
        present = of_host[: self._local.size]
        self._local.gather(present if self._topology.index == 0 else None, data, 0).wait()
        if self._topology.index == 0:
            self._between(Call("all_gather", of_host, everything))
        self._local.broadcast(everything, 0).wait()

    def _end(self, data: Tensor, op: Op) -> None:
        if op is Op.MEAN:
            divide(data, self._topology.size)

    def _between(self, call: Call) -> None:
        assert self._inter_host is not None
        self._inter_host.run(call._replace(timeout_s=self._timeout_s))


def _step(op: Op) -> Op:
    """A mean is summed and divided at the end."""
    return Op.SUM if op is Op.MEAN else op


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
