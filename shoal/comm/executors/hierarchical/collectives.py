"""How collectives go over several hosts: inside each host, between hosts, and inside again.

    all_reduce, long, hosts of equal size L:      n bytes on each of p ranks

        inside    reduce_scatter     every rank has a share of n/L
        between   all_reduce         of that share, with the ranks of the same index elsewhere
        inside    all_gather

    short, or hosts of different size: reduce to the first rank of each host, all_reduce among
    these, broadcast inside.

A byte goes from a host to another once, not once for every rank there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.executors.hierarchical.inter_host import Between
from shoal.comm.executors.hierarchical.topology import Places
from shoal.comm.executors.shared_memory import ShmGroup
from shoal.comm.operator import divide

_LONG_BYTES = 16384


class Across:
    """Flat tensors in the host's memory; every call returns when it is done.

    `column` joins this rank with the ranks of the same index on the other hosts; where hosts are
    of different size, only the first ones have it.
    """

    def __init__(self, places: Places, inner: ShmGroup, column: Between | None):
        self._places = places
        self._inner = inner
        self._column = column
        widest = max(len(ranks) for ranks in places.hosts)
        grid = [[*ranks, *[-1] * (widest - len(ranks))] for ranks in places.hosts]
        self._grid = torch.tensor(grid)  # host, index: the rank, or -1

    def within(self, timeout_s: float) -> Across:
        column = None if self._column is None else self._column.within(timeout_s)
        return Across(self._places, self._inner.within(timeout_s), column)

    def barrier(self) -> None:
        self._inner.barrier().wait()
        if self._places.index == 0:
            self._between.barrier()
        self._inner.barrier().wait()

    def broadcast(self, data: Tensor, root: int) -> None:
        source = self._places.host_of(root)
        places = self._places
        first = places.hosts[source].index(root)
        via = first if places.is_even else 0
        if places.host == source:
            self._inner.broadcast(data, first).wait()
        if places.index == via:
            self._between.broadcast(data, source)
        if places.host != source:
            self._inner.broadcast(data, via).wait()

    def all_reduce(self, data: Tensor, op: str) -> None:
        step = "sum" if op == "mean" else op
        if self._places.is_even and data.nbytes >= _LONG_BYTES:
            self._reduce_shares(data, step)
        else:
            self._combine("reduce", data, data, step)
            if self._places.index == 0:
                self._between.all_reduce(data, step)
            self._inner.broadcast(data, 0).wait()
        self._end(data, op)

    def reduce(self, data: Tensor, root: int, op: str) -> None:
        """`data` is of use at the root only; it is changed everywhere."""
        step = "sum" if op == "mean" else op
        target = self._places.host_of(root)
        self._combine("reduce", data, data, step)
        if self._places.index == 0:
            self._between.reduce(data, step, target)
        if self._places.host == target:
            self._inner.broadcast(data, 0).wait()
            self._end(data, op)

    def all_gather(self, out: Tensor, data: Tensor) -> None:
        """`out` has a row for each rank."""
        hosts, width = self._grid.shape
        if self._places.is_even:
            column = data.new_empty(hosts, data.numel())
            self._between.all_gather(column, data)
            everything = data.new_empty(width, hosts, data.numel())
            self._inner.all_gather(everything, column).wait()
            everything = everything.transpose(0, 1)
        else:
            everything = data.new_empty(hosts, width, data.numel())
            self._gather_by_leaders(everything, data)
        present = self._grid >= 0
        out[self._grid[present]] = everything[present]

    def reduce_scatter(self, out: Tensor, data: Tensor, op: str) -> None:
        """`data` has a row for each rank."""
        step = "sum" if op == "mean" else op
        if self._places.is_even:
            given = data[self._grid.t().reshape(-1)]  # by index, then by host
            column = data.new_empty(self._grid.shape[0], out.numel())
            self._combine("reduce_scatter", given, column, step)
            self._between.reduce_scatter(out, column, step)
        else:
            whole = data.clone().view(-1)
            self.all_reduce(whole, step)
            out.copy_(whole.view(data.shape)[self._places.rank])
        self._end(out, op)

    def _reduce_shares(self, data: Tensor, op: str) -> None:
        width = self._inner.size
        share = -(-data.numel() // width)
        padded = share * width != data.numel()
        whole = data.new_zeros(share * width) if padded else data
        if padded:
            whole[: data.numel()] = data
        piece = data.new_empty(share)
        self._combine("reduce_scatter", whole, piece, op)
        self._between.all_reduce(piece, op)
        self._inner.all_gather(whole, piece).wait()
        if padded:
            data.copy_(whole[: data.numel()])

    def _gather_by_leaders(self, everything: Tensor, data: Tensor) -> None:
        """`everything` is by host and index; hosts are filled up to the size of the largest."""
        local = data.new_zeros(everything.shape[1:])
        part = local[: self._inner.size]
        self._inner.gather(part if self._places.index == 0 else None, data, 0).wait()
        if self._places.index == 0:
            self._between.all_gather(everything, local)
        self._inner.broadcast(everything, 0).wait()

    def _combine(self, kind: str, data: Tensor, out: Tensor, op: str) -> None:
        self._inner.combine(kind, data, out, out.numel(), op).wait()

    def _end(self, data: Tensor, op: str) -> None:
        if op == "mean":
            divide(data, self._places.size)

    @property
    def _between(self) -> Between:
        assert self._column is not None
        return self._column
