"""Collectives over several hosts: shared memory inside a host, TCP or Gloo between hosts.

Collectives run one after the other on a work queue; `collectives` has the steps of each. Where
nothing is combined or copied for many (gather, scatter, all_to_all) every piece goes straight to
its rank as a message.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.call import Call, Operand, as_reduced
from shoal.comm.executor import Executor
from shoal.comm.executors.hierarchical.any_source import Message
from shoal.comm.executors.hierarchical.collectives import HierarchicalCollectives, HostLinks
from shoal.comm.executors.hierarchical.point_to_point import (
    PointToPoint,
    reserved_tag,
    with_global_ranks,
)
from shoal.comm.executors.hierarchical.topology import Topology
from shoal.comm.executors.shared_memory import SharedMemory
from shoal.comm.executors.torch import as_shoal_error, combine_rows
from shoal.comm.group import Group
from shoal.comm.staging import FlatTensor, check_counts, counts_row, counts_table, on_host, widened
from shoal.comm.work_queue import QueuedWork, WorkQueue
from shoal.errors import ShoalError
from shoal.runtime.waits import waiting

_TAGS = 1 << 28  # reserved tags from here on


class Steps(NamedTuple):
    """`run` communicates, on the work queue; then `store` brings the result to the caller."""

    run: Callable[[], None]
    store: Callable[[], None]


@dataclass(frozen=True)
class PieceExchange:
    """Pieces that go straight to their ranks: rank to piece, of what is sent and received."""

    rank: int
    given: Mapping[int, Tensor] = field(default_factory=dict)
    taken: Mapping[int, Tensor] = field(default_factory=dict)
    target: FlatTensor | None = None

    @property
    def sends(self) -> list[tuple[int, Tensor]]:
        return self._others(self.given)

    @property
    def receives(self) -> list[tuple[int, Tensor]]:
        return self._others(self.taken)

    def copy_own(self) -> None:
        if self.rank in self.taken:
            self.taken[self.rank].copy_(self.given[self.rank])

    def store(self) -> None:
        if self.target is not None:
            self.target.store()

    def tag(self, number: int) -> int:
        return reserved_tag(_TAGS + number % _TAGS)

    def _others(self, pieces: Mapping[int, Tensor]) -> list[tuple[int, Tensor]]:
        return [(peer, t) for peer, t in pieces.items() if peer != self.rank and t.numel()]


def exchange_of(call: Call, rank: int, size: int) -> PieceExchange | None:
    """The pieces of a gather, scatter or all_to_all; None for other kinds."""
    if call.kind == "gather":
        given = {call.root: on_host(_given(call.data), copy=True).flat}
        if call.out is None:
            return PieceExchange(rank, given)
        target = on_host(call.out)
        return PieceExchange(rank, given, _rows(target, size), target)
    if call.kind == "scatter":
        target = on_host(_given(call.out))
        given = {} if call.data is None else _rows(on_host(call.data, copy=True), size)
        return PieceExchange(rank, given, {call.root: target.flat}, target)
    if call.kind in ("all_to_all", "all_to_all_uneven"):
        source = on_host(_given(call.data), copy=True)
        target = on_host(_given(call.out))
        given = _divided(source, call.send_counts, size)
        return PieceExchange(rank, given, _divided(target, call.recv_counts, size), target)
    return None


def steps_of(call: Call, collectives: HierarchicalCollectives, rank: int, size: int) -> Steps:
    if call.kind == "barrier":
        return Steps(collectives.barrier, _nothing)
    if call.kind == "broadcast":
        target = on_host(_given(call.data))
        return Steps(lambda: collectives.broadcast(target.flat, call.root), target.store)
    if call.kind == "all_gather":
        flat = on_host(_given(call.data), copy=True).flat
        target = on_host(_given(call.out))
        return Steps(lambda: collectives.all_gather(target.rows(size), flat), target.store)
    wide, store = widened(call, rank)
    run, store_wide = _reduction(wide, collectives, rank, size)

    def store_both() -> None:
        store_wide()
        store()

    return Steps(run, store_both)


def agree_about_counts(call: Call, collectives: HierarchicalCollectives, size: int) -> None:
    """Raise on all ranks where two of them disagree about a piece of an uneven all_to_all."""
    counts = counts_table(size)
    collectives.all_gather(counts, counts_row(call))
    check_counts(counts)


def _reduction(call: Call, collectives: HierarchicalCollectives, rank: int, size: int) -> Steps:
    if call.kind == "all_reduce":
        return _all_reduce(call, collectives)
    if call.kind == "reduce":
        return _reduce(call, collectives, rank)
    if call.kind == "reduce_scatter":
        return _reduce_scatter(call, collectives, size)
    return _scan(call, collectives, rank, size)


def _all_reduce(call: Call, collectives: HierarchicalCollectives) -> Steps:
    target = on_host(_given(call.out))
    if call.out is not call.data:
        target.flat.copy_(on_host(_given(call.data)).flat)
    numbers, op = as_reduced(target.flat, call.op)
    return Steps(lambda: collectives.all_reduce(numbers, op), target.store)


def _reduce(call: Call, collectives: HierarchicalCollectives, rank: int) -> Steps:
    """The other ranks' tensors are left as they were: the sums grow in a copy."""
    source = on_host(_given(call.data), copy=True)
    numbers, op = as_reduced(source.flat, call.op)
    run = lambda: collectives.reduce(numbers, call.root, op)  # noqa: E731
    return Steps(run, source.store if rank == call.root else _nothing)


def _reduce_scatter(call: Call, collectives: HierarchicalCollectives, size: int) -> Steps:
    source = on_host(_given(call.data), copy=True)
    target = on_host(_given(call.out))
    numbers, op = as_reduced(target.flat, call.op)
    rows = as_reduced(source.flat, call.op)[0].view(size, numbers.numel())
    return Steps(lambda: collectives.reduce_scatter(numbers, rows, op), target.store)


def _scan(call: Call, collectives: HierarchicalCollectives, rank: int, size: int) -> Steps:
    flat = on_host(_given(call.data)).flat
    target = on_host(_given(call.out))
    everything = flat.new_empty(size, flat.numel())
    last = rank + (call.kind == "scan")

    def run() -> None:
        collectives.all_gather(everything, flat)
        combine_rows(target.flat, everything[:last], call.op)

    return Steps(run, target.store)


def _rows(buffer: FlatTensor, size: int) -> dict[int, Tensor]:
    return dict(enumerate(buffer.rows(size)))


def _divided(buffer: FlatTensor, counts: tuple[int, ...], size: int) -> dict[int, Tensor]:
    if not counts:
        return _rows(buffer, size)
    return dict(enumerate(torch.split(buffer.flat, list(counts))))


def _given(operand: Operand | None) -> Operand:
    assert operand is not None
    return operand


def _nothing() -> None:
    return None


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
