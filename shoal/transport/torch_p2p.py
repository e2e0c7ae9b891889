"""A transport over torch.distributed: point-to-point messages of a process group."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from shoal.errors import PeerLost, ShoalError
from shoal.runtime.waits import waiting
from shoal.transport.transport import Work


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
