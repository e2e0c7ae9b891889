"""A transport moves the bytes of a tensor from one rank to another; everything else is above it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


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
