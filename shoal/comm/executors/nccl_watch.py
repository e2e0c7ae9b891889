"""Ends this process when another rank is lost, which a call of NCCL would wait for without end.

A rank that computes with the others has called NCCL and waits for its GPU: no exception reaches it
there. So a thread listens to the other ranks in the host's memory, where a loss is noticed. Each
says goodbye when it has finished; one that goes without it was lost, or has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from shoal.comm.executors.nccl import Nccl
from shoal.comm.executors.shared_memory import SharedMemory
from shoal.errors import PeerLost, ShoalError
from shoal.runtime import clock
from shoal.runtime.waits import LongWait, Periodic, add_source

_PERIOD_S = 0.5


class NcclWatch(Periodic):
    """All ranks make one; `end` is called once, in its thread."""

    def __init__(
        self,
        nccl: Nccl,
        shared_memory: SharedMemory,
        end: Callable[[PeerLost], None],
        limit_s: float,
    ):
        """`shared_memory` of the same ranks."""
        super().__init__("shoal-nccl", _PERIOD_S, self._look)
        host = shared_memory.split(range(nccl.size))
        assert host is not None
        self._nccl = nccl
        self._shared_memory = shared_memory
        self._end = end
        self._limit_s = limit_s
        self._host = host
        self._peers: Sequence[int] = [peer for peer in range(nccl.size) if peer != nccl.rank]
        self._goodbyes = {peer: host.recv(torch.zeros(1), peer, 0) for peer in self._peers}
        add_source(self.current_wait)

    def __exit__(self, *error: object) -> None:
        self.close()
        if not any(error):
            for peer in self._peers:
                with suppress(ShoalError):
                    self._host.send(torch.zeros(1), peer, 0).wait()
        self._host.close()

    def current_wait(self) -> LongWait | None:
        """For ranks whose process is stopped; what a GPU computes meanwhile is not known."""
        since_ns = self._nccl.latest.unfinished_since_ns()
        if since_ns is None:
            return None
        whom = [self._host.segment.whom(peer) for peer in self._goodbyes]
        stopped = [one for one in whom if "is stopped" in one]
        if not stopped:
            return None
        doing = self._nccl.latest.doing
        return LongWait(f"rank {self._nccl.rank}", " and ".join(stopped), doing, since_ns)

    def _look(self) -> None:
        doing = self._nccl.latest.doing
        for peer, goodbye in list(self._goodbyes.items()):
            if goodbye.is_lost():
                self._end(self._shared_memory.segment.lost(peer, doing))
                return
            if goodbye.is_done:
                del self._goodbyes[peer]
        since_ns = self._nccl.latest.unfinished_since_ns()
        if since_ns is not None and clock.monotonic_ns() - since_ns > self._limit_s * 1e9:
            self._end(PeerLost(self._nccl.rank, None, doing, self._limit_s))
