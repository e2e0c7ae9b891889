"""Collectives as schedules: selected, proven, and run by one interpreter over any transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from shoal.comm.call import Call, Op
from shoal.comm.executor import Executor
from shoal.comm.executors.schedule_binding import Binding, SlotBuffers, bind
from shoal.comm.executors.schedule_interpreter import Interpreter, Program, compile_for
from shoal.comm.executors.schedule_selection import AlgorithmSelector, Choice, for_subset
from shoal.comm.staging import FlatTensor, check_counts, counts_row, counts_table, widened
from shoal.comm.work_queue import QueuedWork, WorkQueue
from shoal.errors import BadInput
from shoal.schedules.collectives import SEGMENT_BYTES, segments_for
from shoal.schedules.collectives.catalog import build
from shoal.schedules.collectives.cost import Link
from shoal.transport.threads import PendingWork
from shoal.transport.transport import ClosableTransport, SubsetTransport, Transport, Work

_SMALL = 8
_LARGE = 1 << 20
_TRIES = 5


def measured_link(transport: Transport, tag: int) -> Tensor:
    """What ranks 0 and 1 measure, in a few milliseconds; the others have zeros.

    Two sizes, the best of a few tries each: alpha is the time of the small message, beta what
    every further byte adds, gamma the time to add a byte to another.
    """
    if transport.size == 1 or transport.rank > 1:
        return torch.zeros(3, dtype=torch.float64)
    peer = 1 - transport.rank

    def ping_pong(data: Tensor) -> None:
        verbs = (transport.send, transport.recv)
        for verb in verbs if transport.rank == 0 else reversed(verbs):
            verb(data, peer, tag).wait()

    small, large = (torch.zeros(size, dtype=torch.uint8) for size in (_SMALL, _LARGE))
    total = torch.zeros(_LARGE // 4)
    small_s, large_s = (_best_s(partial(ping_pong, data)) / 2 for data in (small, large))
    beta = max(large_s - small_s, 0.0) / (_LARGE - _SMALL)
    gamma = _best_s(partial(total.add_, total)) / _LARGE
    return torch.tensor([small_s, beta, gamma], dtype=torch.float64)


def _best_s(act: Callable[[], object]) -> float:
    best_s = float("inf")
    for _ in range(_TRIES):
        start_s = time.perf_counter()
        act()
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s


_SPACE = 1 << 40  # tags of one duplicate; user tags count up from its start, collectives above
_COLLECTIVES = 1 << 39
_MEASURE = 0  # collectives are numbered from 1


class Scheduled(Executor):
    """Collectives by schedule over any transport.

    `algorithms` has those of some kinds. `link` is the cost of a message, by which the others are
    chosen; where it is not given, it is measured at their first use. Operations run in the order
    of the calls: when one of them is waited for, or with `background` on a thread from the call
    on, beside the computation.
    """

    def __init__(
        self,
        transport: Transport,
        algorithms: Choice | None = None,
        link: Link | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        background: bool = False,
        tag_space: int = 0,
    ):
        self._transport = transport
        self._algorithms = algorithms or {}
        self._tag_space = tag_space
        self.rank = transport.rank
        self.size = transport.size
        self.link = link
        self._segment_bytes = segment_bytes
        self._selector = AlgorithmSelector(self._algorithms, self.rank, self.size)
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
            for_subset(self._algorithms, ranks),
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
        store = binding.load(slots)
        chunk_bytes = int(program.collective.chunk_bytes(binding.num_bytes))
        segments = segments_for(chunk_bytes, self._segment_bytes)
        Interpreter(program, slots, self._transport, tag, binding.call.op, segments).run()
        store()

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
        """All ranks get the numbers of rank 0."""
        program = compile_for(build("broadcast", "tree", self.size), self.rank)
        tag = self._tag(_MEASURE)
        measured = measured_link(self._transport, tag)
        call = Call("broadcast", measured, measured)
        self._run(program, bind(call, self.rank, self.size), tag)
        self.link = Link(*measured.tolist())

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
