"""A call as steps in the host's memory: what is carried out, and what stores the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.call import Call, Operand, as_reduced
from shoal.comm.executors.hierarchical.collectives import HierarchicalCollectives
from shoal.comm.executors.hierarchical.point_to_point import reserved_tag
from shoal.comm.executors.torch import combine_rows
from shoal.comm.staging import FlatTensor, check_counts, counts_row, counts_table, on_host, widened

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
