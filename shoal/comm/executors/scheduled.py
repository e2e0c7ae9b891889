"""Collectives as schedules: selected, proven, and run by one interpreter over any transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.call import Call, Op
from shoal.comm.executor import Executor
from shoal.comm.executors.schedule_interpreter import (
    Binding,
    Interpreter,
    Program,
    SlotBuffers,
    bind,
    compile_for,
)
from shoal.comm.staging import FlatTensor, check_counts, counts_row, counts_table, widened
from shoal.comm.transport.transport import PendingWork, SubsetTransport, Transport, Work
from shoal.comm.work_queue import QueuedWork, WorkQueue
from shoal.errors import BadInput
from shoal.schedules.collectives import SEGMENT_BYTES, Collective, in_order, rooted_at, segments_for
from shoal.schedules.collectives.catalog import build, proven_collective
from shoal.schedules.collectives.cost import Link, cheapest
from shoal.schedules.collectives.kinds import kind_named
from shoal.schedules.collectives.proof import prove
from shoal.schedules.user import is_user_function


class ForRanks(NamedTuple):
    """A user's FILE.py:FUNCTION for groups of `ranks` ranks; groups of other sizes use "auto"."""

    function: str
    ranks: int


class Ordered(NamedTuple):
    """A named algorithm whose rank i is rank `order[i]`: neighbours of a ring are in one rack."""

    name: str
    order: tuple[int, ...]

    def among(self, ranks: Sequence[int]) -> Ordered:
        """For some of the ranks, which are counted from 0 again."""
        return Ordered(self.name, tuple(ranks.index(rank) for rank in self.order if rank in ranks))


# a name, or a function from the number of ranks to a Collective, which is proven before its use
Algorithm = str | Callable[[int], Collective] | ForRanks | Ordered
Choice = Mapping[str, Algorithm]  # by kind; a kind that is left open takes the cheapest


class AlgorithmSelector:
    """Selects and keeps the programs of one rank. Every rank selects the same ones."""

    def __init__(self, choice: Choice, rank: int, ranks: int):
        self._rank = rank
        self._ranks = ranks
        self._own: dict[str, Collective] = {}  # schedules of functions
        self._names: dict[str, str] = {}
        self._orders: dict[str, tuple[int, ...]] = {}
        self._programs: dict[tuple[str, str, int], Program] = {}
        for kind, algorithm in choice.items():
            self._settle(kind_named(kind).name, algorithm)

    def is_auto(self, kind: str) -> bool:
        return self._ranks > 1 and kind not in self._own and kind not in self._names

    def program(self, kind: str, num_bytes: int, link: Link, root: int = 0) -> Program:
        """The program for `num_bytes` of data; the size matters for "auto" only."""
        if kind in self._own:
            name = self._own[kind].name
        else:
            name = self._names.get(kind) or cheapest(kind, self._ranks, _rounded(num_bytes), link)
        key = (kind, name, root)
        if key not in self._programs:
            self._programs[key] = compile_for(self._schedule(*key), self._rank)
        return self._programs[key]

    def _schedule(self, kind: str, name: str, root: int) -> Collective:
        if kind in self._own:
            return rooted_at(self._own[kind], root)
        if is_user_function(name):
            return rooted_at(proven_collective(name, kind, self._ranks), root)
        schedule = build(kind, name, self._ranks, root)
        return in_order(schedule, self._orders[kind]) if kind in self._orders else schedule

    def _settle(self, kind: str, algorithm: Algorithm) -> None:
        if isinstance(algorithm, ForRanks):
            algorithm = algorithm.function if algorithm.ranks == self._ranks else "auto"
        elif isinstance(algorithm, Ordered):
            self._orders[kind] = algorithm.order
            algorithm = algorithm.name
        if not isinstance(algorithm, str):
            self._own[kind] = self._proven(kind, algorithm(self._ranks))
        elif is_user_function(algorithm):
            if self._ranks > 1:  # proven before its first use
                self._names[kind] = algorithm
        elif algorithm != "auto":
            build(kind, algorithm, 1)  # refuses a name that the kind does not have
            self._names[kind] = algorithm

    def _proven(self, kind: str, schedule: Collective) -> Collective:
        if (schedule.kind, schedule.ranks) != (kind, self._ranks):
            raise BadInput(
                f"the schedule {schedule.name!r} is for {schedule.kind} over {schedule.ranks} "
                f"ranks, not for {kind} over {self._ranks}"
            )
        prove(schedule)
        return replace(schedule, name=f"{schedule.name} (own)")


def for_subset(choice: Choice, ranks: Sequence[int]) -> Choice:
    """The choice of a group for some of its ranks."""
    return {
        kind: algorithm.among(ranks) if isinstance(algorithm, Ordered) else algorithm
        for kind, algorithm in choice.items()
    }


def _rounded(num_bytes: int) -> int:
    """Up to a power of two, so that few sizes need a decision of their own."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0


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
        if self._tag_space == 0 and hasattr(self._transport, "close"):
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
