"""Collectives as schedules: selected, proven, and run by one interpreter over any transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.comm.call import Call, Op
from shoal.comm.executor import Executor
from shoal.comm.executors.scheduled.binding import Binding, SlotBuffers, bind
from shoal.comm.executors.scheduled.interpreter import Interpreter, Program, compile_for
from shoal.comm.executors.scheduled.selection import AlgorithmChoice, AlgorithmSelector, for_subset
from shoal.comm.staging import FlatTensor, check_counts, counts_row, counts_table, widened
from shoal.comm.work_queue import QueuedWork, WorkQueue
from shoal.errors import BadInput
from shoal.schedules.collectives.catalog import build
from shoal.schedules.collectives.collective import SEGMENT_BYTES, segments_for
from shoal.schedules.collectives.cost import Link
from shoal.transport.threads import PendingWork
from shoal.transport.transport import ClosableTransport, SubsetTransport, Transport, Work

_SMALL = 8
_LARGE = 1 << 20
_TRIES = 5


def measure_link(transport: Transport, tag: int, broadcast: Callable[[Tensor], None]) -> Link:
    """All ranks call it. `broadcast` goes from rank 0, so that all ranks use the same numbers.

    Two sizes, the best of a few tries each: alpha is the time of the small message, beta what
    every further byte adds, gamma the time to add a byte to another. A few milliseconds.
    """
    measured = torch.zeros(3, dtype=torch.float64)
    if transport.size > 1 and transport.rank < 2:
        small_s, large_s = (_one_way_s(transport, tag, size) for size in (_SMALL, _LARGE))
        beta = max(large_s - small_s, 0.0) / (_LARGE - _SMALL)
        measured = torch.tensor([small_s, beta, _gamma()], dtype=torch.float64)
    broadcast(measured)
    alpha_s, beta, gamma = measured.tolist()
    return Link(alpha_s, beta, gamma)


def _one_way_s(transport: Transport, tag: int, num_bytes: int) -> float:
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    peer = 1 - transport.rank
    return min(_ping_pong_s(transport, tag, data, peer) for _ in range(_TRIES)) / 2


def _ping_pong_s(transport: Transport, tag: int, data: Tensor, peer: int) -> float:
    start = time.perf_counter()
    if transport.rank == 0:
        transport.send(data, peer, tag).wait()
        transport.recv(data, peer, tag).wait()
    else:
        transport.recv(data, peer, tag).wait()
        transport.send(data, peer, tag).wait()
    return time.perf_counter() - start


def _gamma() -> float:
    total = torch.zeros(_LARGE // 4)
    other = torch.zeros(_LARGE // 4)
    best = float("inf")
    for _ in range(_TRIES):
        start = time.perf_counter()
        total.add_(other)
        best = min(best, time.perf_counter() - start)
    return best / _LARGE


_SPACE = 1 << 40  # tags of one duplicate; user tags count up from its start, collectives above
_COLLECTIVES = 1 << 39
_MEASURE = 0  # collectives are numbered from 1


class Scheduled(Executor):
    """Collectives by schedule over any transport.

    `algorithm` is described at `AlgorithmSelector`. `link` is the cost of a message; where the
    algorithm is open and `link` is not given, it is measured at the first use. Operations run in
    the order of the calls: when one of them is waited for, or with `background` on a thread from
    the call on, beside the computation.
    """

    def __init__(
        self,
        transport: Transport,
        algorithm: AlgorithmChoice = "auto",
        link: Link | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        background: bool = False,
        tag_space: int = 0,
    ):
        self._transport = transport
        self._algorithm = algorithm
        self._tag_space = tag_space
        self.rank = transport.rank
        self.size = transport.size
        self.link = link
        self._segment_bytes = segment_bytes
        self._selector = AlgorithmSelector(algorithm, self.rank, self.size)
        self._background = background
        self.queue = WorkQueue("collectives", background, idle_s=0.0)
        self._calls = 0
        self._children = 0

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        tag += self._tag_space * _SPACE
        return self._transport.send(data.detach().contiguous(), dst, tag)

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        target = into.detach()
        landing = target if target.is_contiguous() else torch.empty_like(target).contiguous()
        work = self._transport.recv(landing, src, self._tag_space * _SPACE + tag)
        if landing is target:
            return work

        def finish() -> None:
            work.wait()
            target.copy_(landing)

        return PendingWork(finish)

    def submit(self, call: Call) -> QueuedWork:
        if call.timeout_s is not None:
            raise BadInput(
                "a scheduled group has no timeout for one call: set that of its transport"
            )
        if call.kind == "all_to_all_uneven":
            tags = (self._next_tag(), self._next_tag())
            return self.queue.call(lambda: self._exchange(call, *tags))
        wide, store = widened(_with_token(call), self.rank)
        binding = bind(wide, self.rank, self.size)
        tag = self._next_tag()

        def carry_out() -> None:
            self._carry_out(binding, tag)
            store()

        return self.queue.call(carry_out)

    def split(self, ranks: Sequence[int]) -> Scheduled | None:
        self._children += 1
        if self.rank not in ranks:
            return None
        transport = self._transport
        if list(ranks) != list(range(self.size)):
            transport = SubsetTransport(transport, ranks)
        tag_space = (self._tag_space << 20) | self._children
        return Scheduled(
            transport,
            for_subset(self._algorithm, ranks),
            self.link,
            self._segment_bytes,
            self._background,
            tag_space,
        )

    def close(self) -> None:
        """A transport that can be closed is, with the group that was not split from another."""
        self.queue.close()
        if self._tag_space == 0 and isinstance(self._transport, ClosableTransport):
            self._transport.close()

    def describe(self, call: Call) -> str:
        if call.kind == "all_to_all_uneven":
            return f"{call.kind} {call.num_bytes} bytes"
        binding = bind(_with_token(call), self.rank, self.size)
        return f"{call.kind} {self._program(binding).collective.name} {binding.num_bytes} bytes"

    def bytes_sent(self, call: Call) -> int | None:
        if call.kind == "all_to_all_uneven" or self._selector.is_auto(call.kind):
            return None
        wide = widened(_with_token(call), self.rank).call
        num_bytes = bind(wide, self.rank, self.size).num_bytes
        program = self._selector.program(call.kind, num_bytes, self.link or Link())
        rounds = program.collective.rounds
        times = sum(transfer.src == self.rank for row in rounds for transfer in row)
        return round(times * program.collective.chunk_bytes(num_bytes))

    def record_times(self) -> None:
        self.queue.timed = True

    def calibrate(self) -> Link:
        """Measure what a message costs here, for the choices of "auto". All ranks call it."""
        self.queue.call(self._measure).wait()
        assert self.link is not None
        return self.link

    def _carry_out(self, binding: Binding, tag: int) -> None:
        if self.link is None and self._selector.is_auto(binding.call.kind):
            self._measure()
        self._run(self._program(binding), binding, tag)

    def _program(self, binding: Binding) -> Program:
        call = binding.call
        link = self.link or Link()
        return self._selector.program(call.kind, binding.num_bytes, link, call.root)

    def _run(self, program: Program, binding: Binding, tag: int) -> None:
        slots = SlotBuffers(program.collective, binding.unit_numel, binding.like)
        binding.load(slots)
        chunk_bytes = int(program.collective.chunk_bytes(binding.num_bytes))
        segments = segments_for(chunk_bytes, self._segment_bytes)
        Interpreter(program, slots, self._transport, tag, binding.call.op, segments).run()
        binding.store()

    def _exchange(self, call: Call, counts_tag: int, tag: int) -> None:
        """Pieces of any size: each goes straight to its rank, once all agree about all of them."""
        assert call.data is not None and call.out is not None
        counts = counts_table(self.size)
        said = Call("all_gather", counts_row(call), counts)
        self._carry_out(bind(said, self.rank, self.size), counts_tag)
        check_counts(counts)
        target = FlatTensor(call.out)
        given = torch.split(FlatTensor(call.data, copy=True).flat, list(call.send_counts))
        taken = torch.split(target.flat, list(call.recv_counts))
        taken[self.rank].copy_(given[self.rank])
        peers = [peer for peer in range(self.size) if peer != self.rank]
        works = [self._transport.recv(taken[p], p, tag) for p in peers if taken[p].numel()]
        works += [self._transport.send(given[p], p, tag) for p in peers if given[p].numel()]
        for work in works:
            work.wait()
        target.store()

    def _measure(self) -> None:
        program = compile_for(build("broadcast", "tree", self.size), self.rank)
        tag = self._tag(_MEASURE)

        def broadcast(measured: Tensor) -> None:
            call = Call("broadcast", measured, measured)
            self._run(program, bind(call, self.rank, self.size), tag)

        self.link = measure_link(self._transport, tag, broadcast)

    def _next_tag(self) -> int:
        self._calls += 1
        return self._tag(self._calls)

    def _tag(self, number: int) -> int:
        return self._tag_space * _SPACE + _COLLECTIVES + number


def _with_token(call: Call) -> Call:
    """A barrier as a collective on one number."""
    if call.kind != "barrier":
        return call
    token = torch.zeros(1, dtype=torch.int32)
    return call._replace(data=token, out=token, op=Op.MAX)
