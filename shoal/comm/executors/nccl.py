"""Tensors of GPUs by NCCL, and by the host's way what lies in the host's memory.

    host    flags, sizes, objects, barriers     shared memory, TCP, Gloo; messages by their tags
    NCCL    gradients, weights, activations     in the order of the calls, after what the GPU does

The two have orders of their own, and no caller knows which one a tensor takes. NCCL begins an
operation when the one before has ended, and a send ends when its receiver has called: what two
ranks send to each other is one `exchange`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.call import Call, Operand, PeerMessage
from shoal.comm.executor import Executor
from shoal.comm.executors.torch import Started, Torch
from shoal.comm.staging import FlatTensor
from shoal.comm.transport.transport import TorchWork, Work, Works
from shoal.errors import PeerLost, ShoalError
from shoal.runtime import clock


class UnfinishedCall(NamedTuple):
    doing: str
    start_ns: int
    end: Any  # an event of the GPU


def _recorded() -> Any:
    """An event after what the GPU was given; None while a graph of CUDA is captured."""
    if torch.cuda.is_current_stream_capturing():
        return None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


_NOTICED_S = 5.0  # for a thread that listens to the other ranks


class NcclCalls:
    """The calls of a rank on all its groups of NCCL, for the thread that listens to other ranks.

    A call returns before the GPU has done it, so an event is recorded where it was waited for.
    With `confirms` a wait lasts until then, and raises where a rank was lost meanwhile: NCCL was
    aborted then, and what it has written is not to be used.
    """

    def __init__(self, confirms: bool = False, record: Callable[[], Any] = _recorded):
        self.latest = "no call of NCCL"
        self.confirms = confirms
        self.is_calling = False  # a function of torch, which may wait for other ranks
        self.has_lost = threading.Event()
        self.lost: PeerLost | None = None
        self._record = record
        self._unfinished: deque[UnfinishedCall] = deque()
        self._changing = threading.Lock()

    def lose(self, lost: PeerLost) -> None:
        """From now on calls end with it."""
        self.lost = self.lost or lost
        self.has_lost.set()

    def check(self, doing: str) -> None:
        lost = self.lost
        if lost is not None:
            raise PeerLost(lost.rank, lost.peer, doing, lost.after_s)

    def unfinished(self) -> UnfinishedCall | None:
        """The oldest one that the GPU has not done."""
        with self._changing:
            while self._unfinished and self._unfinished[0].end.query():
                self._unfinished.popleft()
            return self._unfinished[0] if self._unfinished else None

    def wait(self, doing: str, start_ns: int) -> None:
        """The GPU goes on after this call."""
        end = self._record()
        if end is None:
            return
        with self._changing:
            self._unfinished.append(UnfinishedCall(doing, start_ns, end))
        if self.confirms:
            self.is_calling = True
            end.synchronize()
            self.is_calling = False
            self.check(doing)
        self.unfinished()


class Nccl(Torch):
    """A process group of NCCL, and an executor of the same ranks for the host's memory."""

    over = " over NCCL"
    in_order = True
    few_large = True

    def __init__(self, group: dist.ProcessGroup, host: Executor, calls: NcclCalls | None = None):
        super().__init__(group)
        self.host = host
        self.calls = calls or NcclCalls()
        # ranks join at a group's first operation, and not all of them may have a first message
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)

    def submit(self, call: Call) -> Work:
        operand = call.out if call.data is None else call.data
        return super().submit(call) if _is_on_gpu(operand) else self.host.submit(call)

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        return self.exchange([PeerMessage(data, dst, tag)], [])

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        return self.exchange([], [PeerMessage(into, src, tag)])

    def exchange(self, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage]) -> Work:
        given = [m for m in sends if m.data.is_cuda]
        taken = [m for m in receives if m.data.is_cuda]
        works: list[Work] = [self._exchange(given, taken)] if given or taken else []
        if len(given) + len(taken) < len(sends) + len(receives):
            of_host = [m for m in sends if not m.data.is_cuda]
            works.append(self.host.exchange(of_host, [m for m in receives if not m.data.is_cuda]))
        return works[0] if len(works) == 1 else Works(works)

    def split(self, ranks: Sequence[int]) -> Nccl | None:
        host = self.host.split(ranks)
        group = self._split_group(ranks)
        return None if host is None or group is None else Nccl(group, host, self.calls)

    def close(self) -> None:
        self.host.close()

    def describe(self, call: Call) -> str:
        operand = call.out if call.data is None else call.data
        if _is_on_gpu(operand):
            return f"{call.kind} NCCL {call.num_bytes} bytes"
        return self.host.describe(call)

    def record_times(self) -> None:
        super().record_times()
        self.host.record_times()

    def _begin(
        self,
        name: str,
        start: Callable[[], Started],
        timeout_s: float | None = None,
        of: str = "",
    ) -> TorchWork:
        calls = self.calls
        calls.check(name)
        calls.is_calling = True
        try:
            work = super()._begin(name, start, timeout_s, of)
        except ShoalError:
            if calls.confirms and calls.has_lost.wait(_NOTICED_S):
                calls.check(name)
            raise
        finally:
            calls.is_calling = False
        works = work.of_torch if isinstance(work.of_torch, list) else [work.of_torch]
        work.of_torch = GpuWork(works, calls, work.doing, clock.monotonic_ns())
        return work

    def _numbered(self, name: str, of: str) -> str:
        self.calls.latest = super()._numbered(name, of)
        return self.calls.latest

    def _of(self, call: Call) -> str:
        return f" of {call.num_bytes:,} bytes"

    def _exchange(self, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage]) -> TorchWork:
        """One call of NCCL for all of them."""
        targets = [FlatTensor(message.data) for message in receives]
        given = [FlatTensor(message.data).flat for message in sends]
        make = partial(dist.P2POp, group=self._group)
        operations = [
            make(dist.isend, flat, group_peer=message.peer)
            for flat, message in zip(given, sends, strict=True)
        ]
        operations += [
            make(dist.irecv, target.flat, group_peer=message.peer)
            for target, message in zip(targets, receives, strict=True)
        ]

        def start() -> Started:
            return dist.batch_isend_irecv(operations), partial(_store, targets)

        return self._begin(_in_words(sends, receives), start)


class GpuWork(NamedTuple):
    """What torch returns for a call: one work, or that of each message."""

    works: Sequence[Any]
    calls: NcclCalls
    doing: str
    start_ns: int

    def wait(self, limit: timedelta | None = None) -> None:
        for work in self.works:
            if limit is None:
                work.block_current_stream()  # `wait` lasts until the GPU has done it: no_watchdog
            else:
                work.wait(limit)
        self.calls.wait(self.doing, self.start_ns)

    def get_future(self) -> Any:
        return self.works[-1].get_future()


def _is_on_gpu(operand: Operand | None) -> bool:
    if operand is None:
        return False
    return operand.is_cuda if isinstance(operand, Tensor) else operand[0].is_cuda


def _store(targets: Sequence[FlatTensor]) -> None:
    for target in targets:
        target.store()


def _in_words(sends: Sequence[PeerMessage], receives: Sequence[PeerMessage]) -> str:
    to = ", ".join(str(message.peer) for message in sends)
    source = ", ".join(str(message.peer) for message in receives)
    words = [f"send to {to}"] if sends else []
    return " and ".join([*words, f"receive from {source}"] if receives else words)
