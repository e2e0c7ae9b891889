"""Some of the ranks of a transport, counted from 0 again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.transport.transport import ReducingTransport, Transport, Work


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
