"""A group of one rank: every collective is done before it is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.comm.group import Group, Op, check_subgroup
from shoal.errors import ShoalError
from shoal.transport.threads import DoneWork
from shoal.transport.transport import Work


class SoloGroup:
    rank = 0
    size = 1

    def send(self, data: Tensor, dst: int, tag: int = 0) -> Work:
        raise ShoalError("a group of one rank has nobody to send to")

    def recv(self, into: Tensor, src: int, tag: int = 0) -> Work:
        raise ShoalError("a group of one rank has nobody to receive from")

    def broadcast(self, data: Tensor, root: int = 0) -> Work:
        return DoneWork()

    def reduce(self, data: Tensor, root: int = 0, op: Op = Op.SUM) -> Work:
        return DoneWork()

    def all_reduce(self, data: Tensor, op: Op = Op.SUM) -> Work:
        return DoneWork()

    def gather(self, out: Tensor | None, data: Tensor, root: int = 0) -> Work:
        return self._copy(out, data)

    def scatter(self, out: Tensor, data: Tensor | None, root: int = 0) -> Work:
        return self._copy(out, data)

    def all_gather(self, out: Tensor, data: Tensor) -> Work:
        return self._copy(out, data)

    def reduce_scatter(self, out: Tensor, data: Tensor, op: Op = Op.SUM) -> Work:
        return self._copy(out, data)

    def all_to_all(self, out: Tensor, data: Tensor) -> Work:
        return self._copy(out, data)

    def scan(self, data: Tensor, op: Op = Op.SUM) -> Work:
        return DoneWork()

    def barrier(self) -> Work:
        return DoneWork()

    def duplicate(self) -> Group:
        return self

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        check_subgroup(ranks, self.size)
        return self

    @staticmethod
    def _copy(out: Tensor | None, data: Tensor | None) -> Work:
        if out is not None and data is not None:
            out.copy_(data.reshape(out.shape))
        return DoneWork()
