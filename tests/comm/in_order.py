"""An executor on threads that is as strict as NCCL, so that no GPU is needed to keep to its rules.

    one operation after the other, in the order of the calls, each until all its ranks have called
    messages of two ranks in the order of their calls: a tag that does not fit is an error
    whole numbers are what lies in the host's memory, and goes beside

Two ranks that both send before they receive wait for each other, and `PeerLost` ends them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.thread_transport import Mailboxes, ThreadTransport
from shoal.comm.call import Call, PeerMessage
from shoal.comm.executor import Executor
from shoal.comm.executors.scheduled import Scheduled
from shoal.comm.group import Group
from shoal.comm.transport.transport import SubsetTransport, Transport, Work
from shoal.comm.work_queue import WorkQueue
from shoal.schedules.collectives.cost import Link
from tests.cores import one_core
from tests.seeds import begin_rank

T = TypeVar("T")
Numbered = list[tuple[Any, PeerMessage]]  # with the name by which both ends know it
_PATIENCE_S = 10.0


class InOrder(Executor):
    in_order = True
    few_large = True

    def __init__(self, transport: Transport, host: Scheduled, collectives: Scheduled, name: str):
        self.rank = transport.rank
        self.size = transport.size
        self._transport: Any = transport  # its tags may be tuples
        self._host = host
        self._collectives = collectives
        self._name = name
        self._stream = WorkQueue("stream", idle_s=0.0)
        self._called = Counter[tuple[int, int]]()
        self._children = 0

    def submit(self, call: Call) -> Work:
        operand = call.out if call.data is None else call.data
        one = operand[0] if isinstance(operand, list) else operand
        if one is None or not one.is_floating_point():
            return self._host.submit(call)
        return self._stream.call(lambda: self._collectives.submit(call).wait())

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        if not data.is_floating_point():
            return self._host.send(data, dst, tag)
        return self.exchange([PeerMessage(data, dst, tag)], [])

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        if not into.is_floating_point():
            return self._host.recv(into, src, tag)
        return self.exchange([], [PeerMessage(into, src, tag)])

    def exchange(self, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage]) -> Work:
        outgoing = [(self._key(self.rank, m.peer), m) for m in sends]
        incoming = [(self._key(m.peer, self.rank), m) for m in receives]
        return self._stream.call(lambda: self._run(outgoing, incoming))

    def _key(self, source: int, target: int) -> tuple[Any, ...]:
        self._called[source, target] += 1
        return self._name, source, target, self._called[source, target]

    def _run(
        self, outgoing: list[tuple[Any, PeerMessage]], incoming: list[tuple[Any, PeerMessage]]
    ) -> None:
        for key, (data, peer, tag) in outgoing:
            self._transport.send(torch.tensor([tag, data.nbytes]), peer, (*key, "tag"))
            self._transport.send(data.contiguous(), peer, key)
        for key, (into, peer, tag) in incoming:
            came = torch.zeros(2, dtype=torch.int64)
            self._transport.recv(came, peer, (*key, "tag")).wait()
            assert came.tolist() == [tag, into.nbytes], f"{came} instead of {tag}, {into.nbytes}"
            landing = torch.empty_like(into).contiguous()
            self._transport.recv(landing, peer, key).wait()
            into.detach().copy_(landing)
            self._transport.send(torch.zeros(1), peer, (*key, "taken"))
        for key, message in outgoing:
            self._transport.recv(torch.zeros(1), message.peer, (*key, "taken")).wait()

    def split(self, ranks: Sequence[int]) -> InOrder | None:
        self._children += 1
        host = self._host.split(ranks)
        collectives = self._collectives.split(ranks)
        if host is None or collectives is None:
            return None
        transport = SubsetTransport(self._transport, ranks)
        name = f"{self._name}/{self._children} of {list(ranks)}"
        return InOrder(transport, host, collectives, name)


def in_order(transport: Transport) -> InOrder:
    link = Link()
    host = Scheduled(transport, link=link, background=True, tag_space=1)
    return InOrder(transport, host, Scheduled(transport, link=link, tag_space=2), "all")


def in_order_world(size: int, body: Callable[[Group], T]) -> list[T]:
    """As `world`, for groups that are as strict as NCCL."""
    boxes = Mailboxes(size, _PATIENCE_S)

    def main(rank: int) -> T:
        begin_rank(size)
        try:
            return body(Group(in_order(ThreadTransport(boxes, rank))))
        except BaseException:
            boxes.break_all(rank)
            raise

    with one_core(), ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(main, rank) for rank in range(size)]
    return [future.result() for future in futures]
