"""NCCL among the ranks of one generation of an elastic group.

step 41    worker 2 is killed; the GPUs of 0, 1 and 3 wait for it in an all-reduce
watch      the thread of each notices it, and aborts NCCL: the GPU goes on, with garbage
wait       of that all-reduce has lasted until now; it raises PeerLost, before any update
regroup    a communicator of ranks 0, 1 and 3
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _abort_process_group, _world

from shoal.comm.executor import Executor
from shoal.comm.executors.nccl import Nccl, NcclCalls
from shoal.comm.executors.nccl_watch import NcclWatch
from shoal.comm.transport.transport import as_shoal_error
from shoal.errors import PeerLost, ShoalError
from shoal.runtime.config import no_watchdog
from shoal.runtime.wording import say

_ABORT_S = 20.0
_FORMING = "connecting the ranks of NCCL"


class ElasticNccl(Nccl):
    """All ranks make one; the process has no other group of torch. PeerLost where one is lost."""

    def __init__(self, host: Executor, store: Store, limit_s: float):
        no_watchdog()
        calls = NcclCalls(confirms=True)
        calls.latest = _FORMING
        self._watch = NcclWatch(host, calls, partial(_abandon, calls), limit_s, finds_killed=False)
        self._watch.start()
        self.host = host
        self.calls = calls
        calls.is_calling = True
        try:
            dist.init_process_group("nccl", store=store, rank=host.rank, world_size=host.size)
            assert dist.group.WORLD is not None
            super().__init__(dist.group.WORLD, host, calls)
            torch.cuda.synchronize()
            calls.check(_FORMING)
        except Exception as error:
            has_lost = calls.has_lost.is_set()
            self.abandon()
            if isinstance(error, ShoalError):
                raise
            if has_lost:
                raise PeerLost(host.rank, None, _FORMING) from error
            if isinstance(error, RuntimeError):
                raise as_shoal_error(error, host.rank, _FORMING) from error
            raise
        finally:
            calls.is_calling = False

    def abandon(self) -> None:
        """The others that are in this group lose this rank. Nothing of it runs when it returns."""
        timer = _end_later(PeerLost(self.host.rank, None, self.calls.latest), lambda: True)
        self._watch.leave()
        if dist.is_initialized():
            _abort_all()
            torch.cuda.synchronize()
            _abort_process_group()
        timer.cancel()
        self.host.close()

    def close(self) -> None:
        """At the end of the run, where the others may still receive what this rank has sent."""
        if not dist.is_initialized():
            return
        if self.calls.has_lost.is_set() or self.calls.unfinished() is not None:
            self.abandon()
            return
        self._watch.say_goodbye()
        self._watch.leave()
        dist.destroy_process_group()
        self.host.close()


def _abandon(calls: NcclCalls, lost: PeerLost) -> None:
    """In the thread of the watch."""
    calls.lose(lost)
    doing = calls.latest
    _end_later(lost, lambda: calls.is_calling and calls.latest == doing)
    _abort_all()


def _end_later(lost: PeerLost, is_stuck: Callable[[], bool]) -> threading.Timer:
    """End this process: NCCL may be connecting to the rank that was lost, which nothing stops."""

    def end() -> None:
        if is_stuck():
            say(str(lost))
            os._exit(1)

    timer = threading.Timer(_ABORT_S, end)
    timer.daemon = True
    timer.start()
    return timer


def _abort_all() -> None:
    """Of all groups at once: one would wait for the kernels of another one."""
    aborts: list[Callable[[], None]] = [group.abort for group in list(_world.pg_names)]
    threads = [threading.Thread(target=abort, daemon=True) for abort in aborts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
