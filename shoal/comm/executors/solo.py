"""One rank: every collective is done when the call returns."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.comm.call import Call, fill_identity
from shoal.comm.executor import Executor
from shoal.comm.group import Group
from shoal.comm.staging import FlatTensor, check_counts, counts_row
from shoal.comm.transport.transport import DoneWork, Work
from shoal.errors import BadInput


class Solo(Executor):
    rank = 0
    size = 1

    def submit(self, call: Call) -> Work:
        if call.kind == "all_to_all_uneven":
            check_counts(counts_row(call).view(1, -1))
        if call.data is not None and call.out is not None and call.out is not call.data:
            target = FlatTensor(call.out)
            target.flat.copy_(FlatTensor(call.data).flat)
            target.store()
        if call.kind == "exclusive_scan":
            assert isinstance(call.out, Tensor)
            fill_identity(call.out.detach(), call.op)
        return DoneWork()

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        raise BadInput("a group of one rank has no other rank to send to")

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        raise BadInput("a group of one rank has no other rank to receive from")

    def split(self, ranks: Sequence[int]) -> Solo:
        return self


def solo_group() -> Group:
    """A group of this process alone."""
    return Group(Solo())
