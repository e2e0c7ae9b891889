"""How bytes move between two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import PeerLost, ShoalError
from shoal.runtime.waits import waiting


class Work(Protocol):
    """An operation in progress. `wait` returns when it is done, or raises its error."""

    def wait(self) -> None: ...


class Transport(Protocol):
    """Ranks 0..size-1. Messages with the same (source, destination, tag) arrive in order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        """Send `data` (contiguous); it may be changed again once the work is done."""
        ...

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        """Receive into `into` (contiguous, of the same size and dtype as what was sent)."""
        ...


@runtime_checkable
class ClosableTransport(Transport, Protocol):
    """A transport that holds connections."""

    def close(self) -> None: ...


@runtime_checkable
class ReducingTransport(Transport, Protocol):
    """A transport that can combine what arrives with what is there; operators by their names."""

    def can_reduce(self, dtype: torch.dtype, op: str) -> bool: ...
    def recv_reduce(self, into: Tensor, src: int, tag: int, op: str) -> Work:
        """`into` = `into` (op) the message; a mean is summed."""
        ...


class SubsetTransport:
    """`ranks[i]` of `transport` is rank i here; `ranks` must include this rank."""

    def __init__(self, transport: Transport, ranks: Sequence[int]):
        self._transport = transport
        self._ranks = tuple(ranks)
        self.rank = self._ranks.index(transport.rank)
        self.size = len(self._ranks)

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        return self._transport.send(data, self._ranks[dst], tag)

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        return self._transport.recv(into, self._ranks[src], tag)

    def can_reduce(self, dtype: torch.dtype, op: str) -> bool:
        inner = self._transport
        return isinstance(inner, ReducingTransport) and inner.can_reduce(dtype, op)

    def recv_reduce(self, into: Tensor, src: int, tag: int, op: str) -> Work:
        assert isinstance(self._transport, ReducingTransport)
        return self._transport.recv_reduce(into, self._ranks[src], tag, op)


class TorchWork:
    """A torch request; its failure is raised as `PeerLost`."""

    def __init__(self, request: dist.Work, rank: int, peer: int, doing: str):
        self._request = request
        self._rank = rank
        self._peer = peer
        self._doing = doing

    def wait(self) -> None:
        try:
            with waiting(f"rank {self._rank}", f"rank {self._peer}", self._doing):
                self._request.wait()
        except RuntimeError as error:
            raise PeerLost(self._rank, self._peer, self._doing) from error


class TorchTransport:
    """Ranks are those of `group` (default: the world). For Gloo and tensors on the CPU."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        request = dist.isend(data, group=self._group, group_dst=dst, tag=short_tag(tag))
        return self._work(request, dst, f"send tag {tag}")

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        request = dist.irecv(into, group=self._group, group_src=src, tag=short_tag(tag))
        return self._work(request, src, f"recv tag {tag}")

    def _work(self, request: dist.Work | None, peer: int, doing: str) -> Work:
        if request is None:
            raise ShoalError("this process is not a member of the group it communicates in")
        return TorchWork(request, self.rank, peer, doing)


def short_tag(tag: int) -> int:
    """Gloo's tags have 31 bits: 20 of the number, 1 for collectives, 10 of the tag space.

    Messages whose tags become equal here are distinguished by their order only, so they must not
    be in flight together; that would take a million operations at once.
    """
    number = tag & 0xFFFFF
    collective = tag >> 39 & 1
    space, spaces = 0, tag >> 40
    while spaces:  # 20 bits for each group from which this one was split
        space = 37 * space + (spaces & 0xFFFFF)
        spaces >>= 20
    return number | collective << 20 | space % 1024 << 21
