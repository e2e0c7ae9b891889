"""Tensors of GPUs by NCCL, and by the host's way what lies in the host's memory.

    host    flags, sizes, objects, barriers     shared memory, TCP or Gloo; messages by their tags
    NCCL    gradients, weights, activations     in the order of the calls, after what the GPU does

The two have orders of their own, and no caller knows which one a tensor takes. NCCL begins an
operation when the one before has ended, and a send ends when its receiver has called: what two
ranks send to each other is one `exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from shoal.runtime import clock
from shoal.transport.transport import TorchWork, Work, Works


@dataclass
class LatestCall:
    """What a rank has called last, on any of its groups."""

    doing: str = "no call of NCCL"
    works: list[Any] = field(default_factory=list)  # its own, until the GPU is seen to have done it
    start_ns: int = 0

    def unfinished_since_ns(self) -> int | None:
        """None where the GPU has done it: then its tensors, which a work holds, are released."""
        works = self.works
        if works and works[0].is_completed():
            works.clear()
        return self.start_ns if works else None


class Nccl(Torch):
    """A process group of NCCL, and an executor of the same ranks for the host's memory."""

    over = " over NCCL"
    in_order = True
    few_large = True

    def __init__(self, group: dist.ProcessGroup, host: Executor, latest: LatestCall | None = None):
        super().__init__(group)
        self.host = host
        self.latest = latest or LatestCall()
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
        return None if host is None or group is None else Nccl(group, host, self.latest)

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
        self, name: str, start: Callable[[], Started], timeout_s: float | None = None
    ) -> TorchWork:
        work = super()._begin(name, start, timeout_s)
        self.latest.doing = work.doing
        self.latest.start_ns = clock.monotonic_ns()
        self.latest.works = [work.of_torch]
        return work

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
            works = _TorchWorks(dist.batch_isend_irecv(operations))
            return works, partial(_store, targets)

        return self._begin(_in_words(sends, receives), start)


class _TorchWorks(NamedTuple):
    """What torch returns for a batch of messages."""

    works: Sequence[Any]

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self, limit: timedelta | None = None) -> None:
        for work in self.works:
            work.wait() if limit is None else work.wait(limit)


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
