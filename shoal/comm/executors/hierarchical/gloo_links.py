"""Between hosts over Gloo: collectives among one rank of each host, and messages."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.comm.call import TORCH_OPS, Op
from shoal.comm.executors.hierarchical.inter_host import column_of
from shoal.comm.executors.hierarchical.topology import Topology
from shoal.errors import ShoalError


class GlooInterHost:
    """Gloo's collectives; see `InterHost`."""

    def __init__(self, gloo: Any):
        self._open = gloo  # a ProcessGroupGloo; torch's stubs know few of its methods
        self._timeout_s = 0.0

    @property
    def _gloo(self) -> Any:
        if self._open is None:
            raise ShoalError("this group is closed")
        return self._open

    def set_timeout(self, timeout_s: float) -> None:
        self._gloo.set_timeout(timedelta(seconds=timeout_s))

    def close(self) -> None:
        """Without a reference Gloo closes its connections, which wakes up the other side."""
        self._open = None

    def with_timeout(self, timeout_s: float) -> GlooInterHost:
        other = copy.copy(self)
        other._timeout_s = timeout_s
        return other

    def barrier(self) -> None:
        self._gloo.barrier(self._limited(dist.BarrierOptions())).wait()

    def broadcast(self, data: Tensor, root: int) -> None:
        options = self._limited(dist.BroadcastOptions())
        options.rootRank = root
        options.rootTensor = 0
        self._gloo.broadcast([_as_bytes(data)], options).wait()

    def all_gather(self, out: Tensor, data: Tensor) -> None:
        """`out` has a row for each host."""
        rows = list(_as_bytes(out).view(out.shape[0], -1))
        options = self._limited(AllgatherOptions())
        self._gloo.allgather([rows], [_as_bytes(data)], options).wait()

    def all_reduce(self, data: Tensor, op: Op) -> None:
        options = self._limited(dist.AllreduceOptions())
        options.reduceOp = TORCH_OPS[op]
        given = _widened(data)
        self._gloo.allreduce([given], options).wait()
        _copy_back(data, given)

    def reduce(self, data: Tensor, op: Op, root: int) -> None:
        options = self._limited(dist.ReduceOptions())
        options.reduceOp = TORCH_OPS[op]
        options.rootRank = root
        options.rootTensor = 0
        given = _widened(data)
        self._gloo.reduce([given], options).wait()
        _copy_back(data, given)

    def reduce_scatter(self, out: Tensor, data: Tensor, op: Op) -> None:
        options = self._limited(dist.ReduceScatterOptions())
        options.reduceOp = TORCH_OPS[op]
        taken = _widened(out)
        self._gloo._reduce_scatter_base(taken, _widened(data).view(-1), options).wait()
        _copy_back(out, taken)

    def _limited(self, options: Any) -> Any:
        if self._timeout_s:
            options.timeout = timedelta(seconds=self._timeout_s)
        return options


class GlooLinks:
    """Connections of one group, made by Gloo. `store` is common to all ranks and used here only."""

    def __init__(self, topology: Topology, store: Store, timeout_s: float):
        self._topology = topology
        self._store = store
        self._timeout_s = timeout_s

    def inter_host(self) -> GlooInterHost | None:
        topology = self._topology
        if column_of(topology) is None:
            return None
        name = f"column {topology.index}"
        return GlooInterHost(self._gloo(name, topology.host, len(topology.hosts)))

    def mesh(self) -> Any:
        return self._gloo("mesh", self._topology.rank, self._topology.size)

    def subset(self, name: str, topology: Topology, ranks: Sequence[int]) -> GlooLinks:
        return GlooLinks(topology, PrefixStore(name, self._store), self._timeout_s)

    def close(self) -> None:
        return None

    def _gloo(self, name: str, rank: int, size: int) -> Any:
        prefixed = PrefixStore(name, self._store)
        return dist.ProcessGroupGloo(prefixed, rank, size, timedelta(seconds=self._timeout_s))


def _as_bytes(data: Tensor) -> Tensor:
    return data.view(-1).view(torch.uint8)


def _widened(data: Tensor) -> Tensor:
    """Gloo has no integers of 16 bits."""
    return data.int() if data.dtype == torch.int16 else data


def _copy_back(data: Tensor, result: Tensor) -> None:
    if result is not data:
        data.copy_(result)
