"""Between hosts over Gloo: collectives among one rank of each host, and messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.comm.call import TORCH_OPS, Call, Operand
from shoal.comm.executors.hierarchical.collectives import column_of
from shoal.comm.executors.hierarchical.point_to_point import as_bytes, reserved_tag
from shoal.comm.executors.hierarchical.topology import Topology
from shoal.errors import BadInput, ShoalError
from shoal.transport.shm.messages import ANY_SOURCE
from shoal.transport.transport import TorchWork, as_shoal_error

# Gloo's tags have 31 bits
_USER_TAGS = 1 << 30
_SHORT = (1 << 29) - 1


class GlooInterHost:
    """Gloo's collectives; see `InterHost`."""

    def __init__(self, gloo: Any):
        self._open = gloo  # a ProcessGroupGloo; torch's stubs know few of its methods

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

    def run(self, call: Call) -> None:
        options = _OPTIONS[call.kind]()
        if call.timeout_s:
            options.timeout = timedelta(seconds=call.timeout_s)
        if call.kind in ("broadcast", "reduce"):
            options.rootRank = call.root
            options.rootTensor = 0
        if call.kind in ("all_reduce", "reduce", "reduce_scatter"):
            options.reduceOp = TORCH_OPS[call.op]
            self._reduce(call, options)
        elif call.kind == "barrier":
            self._gloo.barrier(options).wait()
        elif call.kind == "broadcast":
            self._gloo.broadcast([as_bytes(_given(call.data))], options).wait()
        else:
            assert isinstance(call.out, Tensor)
            rows = list(as_bytes(call.out).view(len(call.out), -1))
            self._gloo.allgather([rows], [as_bytes(_given(call.data))], options).wait()

    def _reduce(self, call: Call, options: Any) -> None:
        """Gloo has no integers of 16 bits: they are summed in 32."""
        assert isinstance(call.data, Tensor) and isinstance(call.out, Tensor)
        is_short = call.out.dtype == torch.int16
        taken = call.out.int() if is_short else call.out
        if call.kind == "reduce_scatter":
            given = call.data.int() if is_short else call.data
            self._gloo._reduce_scatter_base(taken, given.view(-1), options).wait()
        elif call.kind == "reduce":
            self._gloo.reduce([taken], options).wait()
        else:
            self._gloo.allreduce([taken], options).wait()
        if is_short:
            call.out.copy_(taken)


_OPTIONS: dict[str, Callable[[], Any]] = {
    "barrier": dist.BarrierOptions,
    "broadcast": dist.BroadcastOptions,
    "all_gather": AllgatherOptions,
    "all_reduce": dist.AllreduceOptions,
    "reduce": dist.ReduceOptions,
    "reduce_scatter": dist.ReduceScatterOptions,
}


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

    def mesh(self) -> GlooMesh:
        rank = self._topology.rank
        return GlooMesh(self._gloo("mesh", rank, self._topology.size), rank, self._timeout_s)

    def subset(self, name: str, topology: Topology, ranks: Sequence[int]) -> GlooLinks:
        return GlooLinks(topology, PrefixStore(name, self._store), self._timeout_s)

    def close(self) -> None:
        return None

    def _gloo(self, name: str, rank: int, size: int) -> Any:
        prefixed = PrefixStore(name, self._store)
        return dist.ProcessGroupGloo(prefixed, rank, size, timedelta(seconds=self._timeout_s))


def _given(operand: Operand | None) -> Tensor:
    assert isinstance(operand, Tensor)
    return operand


class GlooMesh:
    """Messages of a ProcessGroupGloo; see `HostMessages`."""

    def __init__(self, gloo: Any, rank: int, timeout_s: float):
        self._gloo = gloo
        self._rank = rank
        self._timeout_s = timeout_s

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._gloo.set_timeout(timedelta(seconds=timeout_s))

    def send(self, data: Tensor, dst: int, tag: int) -> TorchWork:
        short = _short_tag(tag)
        return self._post(lambda: self._gloo.send([data], dst, short), dst, f"send to {dst}", tag)

    def recv(self, into: Tensor, src: int, tag: int) -> TorchWork:
        short = _short_tag(tag)
        if src == ANY_SOURCE:
            begin = partial(self._gloo.recv_anysource, [into], short)
            return self._post(begin, src, "recv from any source", tag)
        return self._post(lambda: self._gloo.recv([into], src, short), src, f"recv from {src}", tag)

    def _post(self, begin: Callable[[], Any], peer: int, doing: str, tag: int) -> TorchWork:
        doing = f"{doing}, tag {tag}"
        try:
            return TorchWork(begin(), self._rank, peer, doing)
        except RuntimeError as error:
            raise as_shoal_error(error, self._rank, doing, peer) from error

    def abort(self) -> None:
        """Without a reference Gloo closes its connections, which wakes up the other side."""
        self._gloo = None


def _short_tag(tag: int) -> int:
    if tag >= reserved_tag(0):
        return _USER_TAGS | (tag & _SHORT)
    if not 0 <= tag < _USER_TAGS:
        raise BadInput(f"over Gloo tags go from 0 to {_USER_TAGS - 1}, not {tag}")
    return tag
