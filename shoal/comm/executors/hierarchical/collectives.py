"""Collectives over several hosts: inside each host, between hosts, and inside again.

    all_reduce, long, hosts of equal size L:      n bytes on each of p ranks

        inside    reduce_scatter     every rank has a slice of n/L
        between   all_reduce         of that slice, with the ranks of the same index elsewhere
        inside    all_gather

    short, or hosts of different size: reduce to the first rank of each host, all_reduce among
    these, broadcast inside.

A byte goes from one host to another once, not once for every rank there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.call import Call, Op, divide
from shoal.comm.executors.hierarchical.tcp_links import TcpInterHost
from shoal.comm.executors.hierarchical.topology import Topology
from shoal.comm.group import Group

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
