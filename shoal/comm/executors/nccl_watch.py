"""Ends this process when another rank is lost, which a call of NCCL would wait for without end.

A rank that computes with the others has called NCCL and waits for its GPU: no exception reaches it
there. So a thread listens to the other ranks in the host's memory, where a loss is noticed. Each
says goodbye when it has finished; one that goes without it was lost, or has failed. The
connections of NCCL break before a process has ended, and a rank that fails for that reason leaves,
too: so each looks for one that was killed, before it names one that has left.
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
_LOOKS = 3  # for a rank that was killed, where one has left


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
        self._looks = 0
        add_source(self.current_wait)

    def __exit__(self, *error: object) -> None:
        self.close()
        if isinstance(error[1], PeerLost) and error[1].peer is None:  # as NCCL says it
            for _ in range(_LOOKS):
                if self._has_lost():
                    break
                clock.sleep(_PERIOD_S)
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

    def _has_lost(self) -> bool:
        """Whether a rank was lost, after `end` was called for it."""
        lost: list[PeerLost] = []
        for peer, goodbye in list(self._goodbyes.items()):
            if goodbye.is_lost():
                lost.append(self._shared_memory.segment.lost(peer, self._nccl.latest.doing))
            elif goodbye.is_done:
                del self._goodbyes[peer]
        killed = [one for one in lost if (one.exit_status or 0) < 0]
        self._looks += bool(lost)
        if not killed and (not lost or self._looks < _LOOKS):
            return False
        self._end((killed or lost)[0])
        return True

    def _look(self) -> None:
        if self._has_lost():
            return
        doing = self._nccl.latest.doing
        since_ns = self._nccl.latest.unfinished_since_ns()
        if since_ns is not None and clock.monotonic_ns() - since_ns > self._limit_s * 1e9:
            self._end(PeerLost(self._nccl.rank, None, doing, self._limit_s))
