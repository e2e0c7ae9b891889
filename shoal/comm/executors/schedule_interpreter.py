"""The one interpreter that carries out any schedule on any transport.

Every chunk is divided into segments, and all segments of a chunk take the same path. A rank works
through (round, segment) in order: before it issues segment s of round r it finishes segment s
of round r-1. So while it adds one segment, the next ones are on the wire, and a long vector
is pipelined along a chain or a tree:

    rank 0   send 0   send 1   send 2
    rank 1            0 -> on  1 -> on  2 -> on
    rank 2                     0 -> on  1 -> on   …

Where several contributions reach a slot in one round they are added in the order of ranks,
including that of this rank, so that every rank gets the same bits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.call import Call, Op, Operand, divide, fill_identity, num_bytes
from shoal.comm.staging import FlatTensor, share_storage
from shoal.comm.transport.transport import ReducingTransport, Transport, Work
from shoal.errors import PeerLost
from shoal.schedules.collectives import Collective


class SlotBuffers:
    """Slots as flat views. Slots that belong to no tensor of the caller are made when needed.

    Every unit has `unit_numel` elements and is divided as evenly as possible: chunk i of k begins
    at element i * n // k.
    """

    def __init__(self, collective: Collective, unit_numel: int, like: Tensor):
        self._chunks = collective.chunks
        self._per_unit = collective.chunks_per_unit
        self._unit_numel = unit_numel
        self._like = like
        self._bound: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    def bind(self, unit: int, flat: Tensor) -> None:
        """Unit `unit` lies in `flat`: its chunks are views of it."""
        for chunk in range(self._per_unit):
            first, last = self._bounds(chunk)
            self._bound[unit * self._per_unit + chunk] = flat[first:last]

    def slot(self, slot: int) -> Tensor:
        view = self._bound.get(slot)
        if view is None:
            view = self._made.get(slot)
        if view is None:
            first, last = self._bounds(slot % self._chunks % self._per_unit)
            view = self._like.new_empty(last - first)
            self._made[slot] = view
        return view

    def segment(self, slot: int, index: int, segments: int) -> Tensor:
        """One of the segments into which a slot is divided."""
        view = self.slot(slot)
        if segments == 1:
            return view
        numel = view.numel()
        return view[index * numel // segments : (index + 1) * numel // segments]

    def joined(self, slots: list[int], index: int, segments: int) -> Tensor:
        """That segment of several slots as one flat tensor: a view if they are adjacent."""
        views = [self.segment(slot, index, segments) for slot in slots]
        if len(views) == 1:
            return views[0]
        return _joined(views)

    def release(self, slots: list[int]) -> None:
        """Free the memory of slots that were made here and are not needed any more."""
        for slot in slots:
            self._made.pop(slot, None)

    def _bounds(self, chunk: int) -> tuple[int, int]:
        numel = self._unit_numel
        count = self._per_unit
        return chunk * numel // count, (chunk + 1) * numel // count


def _joined(views: list[Tensor]) -> Tensor:
    views = [view for view in views if view.numel()] or views[:1]
    first = views[0]
    total = sum(view.numel() for view in views)
    expected = first.data_ptr()
    for view in views:
        if view.data_ptr() != expected or not share_storage(view, first):
            return torch.cat(views)
        expected += view.numel() * view.element_size()
    return first.as_strided((total,), (1,))


class Binding(NamedTuple):
    """One call on one rank; `num_bytes` is V of the price, `like` what one rank gives or gets.

    It knows what the interpreter does not: which tensor holds which unit, what is copied before,
    and what is divided or copied back after.
    """

    call: Call
    rank: int
    size: int
    like: Tensor
    unit_numel: int
    num_bytes: int

    def load(self, slots: SlotBuffers) -> Callable[[], None]:
        """Give the tensors of the call to the slots; returns what takes the result from them.

        Both are done when the operation is carried out, not when it is called.
        """
        if self.call.kind in ("gather", "all_gather"):
            return self._gather(slots)
        if self.call.kind == "scatter":
            return self._scatter(slots)
        if self.call.kind == "reduce_scatter":
            return self._reduce_scatter(slots)
        return (self._all_to_all if self.call.kind == "all_to_all" else self._vector)(slots)

    def _vector(self, slots: SlotBuffers) -> Callable[[], None]:
        """broadcast, reduce, all_reduce, scan: the vector is changed where it lies."""
        kind = self.call.kind
        op = self.call.op
        out = _tensor(self.call.out)
        is_input_kept = kind == "reduce" and self.rank != self.call.root
        if self.call.out is not self.call.data:
            out.detach().copy_(self.like.detach().reshape(out.shape))
        target = FlatTensor(out, copy=is_input_kept)
        slots.bind(0, target.flat)

        def store() -> None:
            if kind == "exclusive_scan" and self.rank == 0:
                fill_identity(target.flat, op)
            elif op is Op.MEAN:
                counts = {"scan": self.rank + 1, "exclusive_scan": self.rank, "broadcast": 1}
                divide(target.flat, counts.get(kind, self.size))
            target.store()

        return _nothing if is_input_kept else store

    def _gather(self, slots: SlotBuffers) -> Callable[[], None]:
        given = FlatTensor(self.like).flat
        if self.call.out is None:
            slots.bind(self.rank, given)
            return _nothing
        target = FlatTensor(self.call.out)
        self._bind_rows(slots, target)[self.rank].copy_(given)
        return target.store

    def _scatter(self, slots: SlotBuffers) -> Callable[[], None]:
        target = FlatTensor(self.like)
        if self.call.data is None:
            slots.bind(self.rank, target.flat)
        else:
            rows = self._bind_rows(slots, FlatTensor(self.call.data))
            target.flat.copy_(rows[self.rank])
        return target.store

    def _reduce_scatter(self, slots: SlotBuffers) -> Callable[[], None]:
        """`data` is left as it was: the sums grow in a copy of it."""
        assert self.call.data is not None
        total = self._bind_rows(slots, FlatTensor(self.call.data, copy=True))[self.rank]

        def store() -> None:
            if self.call.op is Op.MEAN:
                divide(total, self.size)
            self.like.detach().copy_(total.view(self.like.shape))

        return store

    def _all_to_all(self, slots: SlotBuffers) -> Callable[[], None]:
        data = self.call.data
        out = self.call.out
        assert data is not None and out is not None
        tensors = isinstance(data, Tensor) and isinstance(out, Tensor)  # lists are copied anyway
        copy = tensors and share_storage(_tensor(out), _tensor(data))
        given = FlatTensor(data, copy).rows(self.size)
        target = FlatTensor(out)
        taken = target.rows(self.size)
        for peer in range(self.size):
            slots.bind(self.rank * self.size + peer, given[peer])
            if peer != self.rank:
                slots.bind(peer * self.size + self.rank, taken[peer])
        taken[self.rank].copy_(given[self.rank])
        return target.store

    def _bind_rows(self, slots: SlotBuffers, buffer: FlatTensor) -> Tensor:
        """Piece r of the buffer is unit r; returns the pieces as rows."""
        rows = buffer.rows(self.size)
        for rank in range(self.size):
            slots.bind(rank, rows[rank])
        return rows


def bind(call: Call, rank: int, size: int) -> Binding:
    is_taken = call.data is None or call.kind in ("scatter", "reduce_scatter")
    operand = call.out if is_taken else call.data
    like = _tensor(operand[0] if isinstance(operand, list) else operand)
    if call.kind == "all_to_all":
        whole = num_bytes(call.data)
        return Binding(call, rank, size, like, whole // like.element_size() // size, whole)
    is_vector = call.kind not in ("gather", "all_gather", "scatter", "reduce_scatter")
    whole = like.nbytes if is_vector else like.nbytes * size
    return Binding(call, rank, size, like, like.numel(), whole)


def _tensor(operand: Operand | None) -> Tensor:
    assert isinstance(operand, Tensor)
    return operand


def _nothing() -> None:
    return None


@dataclass
class ProgramStep:
    """One round as one rank sees it; rounds in which it does nothing are left out.

    `sends` and `receives` go by peer: the slots of one message in the order in which they lie
    in it. `local` are (from slot, into slot, reduce) within the rank.
    """

    round: int
    sends: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[int, list[tuple[int, bool]]] = field(default_factory=lambda: defaultdict(list))
    local: list[tuple[int, int, bool]] = field(default_factory=list)
    last_use: list[int] = field(default_factory=list)  # slots that are not used afterwards

    @cached_property
    def read(self) -> set[int]:
        """The slots whose contents of before the round are needed during it."""
        sent = {slot for slots in self.sends.values() for slot in slots}
        return sent | {slot for slot, _, _ in self.local}

    @cached_property
    def contributions(self) -> Counter[int]:
        """How many messages and local copies reach each slot."""
        received = [slot for slots in self.receives.values() for slot, _ in slots]
        return Counter([*received, *(into for _, into, _ in self.local)])

    @property
    def touched(self) -> set[int]:
        received = {slot for slots in self.receives.values() for slot, _ in slots}
        return self.read | received | {into for _, into, _ in self.local}


@dataclass(frozen=True)
class Program:
    """The steps of one rank."""

    collective: Collective
    rank: int
    steps: tuple[ProgramStep, ...]


def compile_for(collective: Collective, rank: int) -> Program:
    """Read the rank's rows out of the schedule's table."""
    table = collective.table
    mine = table.only((table.src == rank) | (table.dst == rank))
    steps: dict[int, ProgramStep] = {}
    columns = (mine.round, mine.src, mine.dst, mine.chunk, mine.into, mine.reduce)
    for number, src, dst, chunk, into, reduce in zip(*(c.tolist() for c in columns), strict=True):
        step = steps.setdefault(number, ProgramStep(number))
        if src == dst:
            step.local.append((chunk, into, reduce))
        elif src == rank:
            step.sends[dst].append(chunk)
        else:
            step.receives[src].append((into, reduce))
    ordered = tuple(steps[number] for number in sorted(steps))
    _mark_last_uses(ordered)
    return Program(collective, rank, ordered)


def _mark_last_uses(steps: tuple[ProgramStep, ...]) -> None:
    seen: set[int] = set()
    for step in reversed(steps):
        fresh = step.touched - seen
        step.last_use = sorted(fresh)
        seen = seen | fresh


@dataclass
class _Flight:
    """The messages of one segment of one step."""

    sends: list[Work] = field(default_factory=list)
    receives: list[Work] = field(default_factory=list)
    staged: list[tuple[int, Tensor, list[tuple[int, bool]]]] = field(default_factory=list)


@dataclass
class Interpreter:
    """One execution of a program: its buffers, its operator, its tag on the wire."""

    program: Program
    slots: SlotBuffers
    transport: Transport
    tag: int
    op: Op = Op.SUM
    segments: int = 1

    def run(self) -> None:
        flights: list[_Flight] = []
        steps = self.program.steps
        for number, step in enumerate(steps):
            for segment in range(self.segments):
                if number:
                    self._finish(steps[number - 1], segment, flights[segment])
                flight = self._issue(step, segment)
                flights[segment : segment + 1] = [flight]
            if number:
                self.slots.release(steps[number - 1].last_use)
        for segment, flight in enumerate(flights):
            self._finish(steps[-1], segment, flight)

    def _issue(self, step: ProgramStep, segment: int) -> _Flight:
        """Post the sends and the receives of one segment."""
        flight = _Flight()
        for dst, slots in step.sends.items():
            data = self.slots.joined(slots, segment, self.segments)
            if data.numel():
                flight.sends.append(self.transport.send(data, dst, self.tag))
        for src, slots_in in step.receives.items():
            if self._is_reduced_on_arrival(step, slots_in):
                into = self.slots.segment(slots_in[0][0], segment, self.segments)
                if into.numel():
                    assert isinstance(self.transport, ReducingTransport)
                    op = self.op.value
                    flight.receives.append(self.transport.recv_reduce(into, src, self.tag, op))
                continue
            into, staged = self._receive_buffer(step, slots_in, segment)
            if into.numel():
                flight.receives.append(self.transport.recv(into, src, self.tag))
                if staged:
                    flight.staged.append((src, into, slots_in))
        return flight

    def _is_reduced_on_arrival(self, step: ProgramStep, slots: list[tuple[int, bool]]) -> bool:
        """Whether the transport may combine a message with its slot while it arrives."""
        slot, reduce = slots[0]
        return (
            len(slots) == 1
            and reduce
            and slot not in step.read
            and step.contributions[slot] == 1
            and isinstance(self.transport, ReducingTransport)
            and self.transport.can_reduce(self.slots.dtype, self.op.value)
        )

    def _receive_buffer(
        self, step: ProgramStep, slots: list[tuple[int, bool]], segment: int
    ) -> tuple[Tensor, bool]:
        """Where a message is received: in its slot if that is free, otherwise in a new tensor."""
        if len(slots) == 1 and not slots[0][1] and slots[0][0] not in step.read:
            return self.slots.segment(slots[0][0], segment, self.segments), False
        views = [self.slots.segment(slot, segment, self.segments) for slot, _ in slots]
        return views[0].new_empty(sum(view.numel() for view in views)), True

    def _finish(self, step: ProgramStep, segment: int, flight: _Flight) -> None:
        """Wait for the messages of the segment, then write what has arrived."""
        self._wait(step, flight)
        arrived = self._arrived(step, segment, flight)
        for slot, values in arrived.items():
            into = self.slots.segment(slot, segment, self.segments)
            replaced = [value for _, value, reduce in values if not reduce]
            if replaced:
                into.copy_(replaced[0])
            else:
                self._add(into, [(rank, value) for rank, value, _ in values])

    def _wait(self, step: ProgramStep, flight: _Flight) -> None:
        try:
            for work in (*flight.receives, *flight.sends):
                work.wait()
        except PeerLost as lost:
            doing = f"{self.program.collective} round {step.round}, {lost.doing}"
            raise PeerLost(lost.rank, lost.peer, doing, lost.after_s, lost.exit_status) from lost

    def _arrived(
        self, step: ProgramStep, segment: int, flight: _Flight
    ) -> dict[int, list[tuple[int, Tensor, bool]]]:
        """By slot: (source, value, reduce)."""
        arrived: dict[int, list[tuple[int, Tensor, bool]]] = defaultdict(list)
        for src, data, slots in flight.staged:
            start = 0
            for slot, reduce in slots:
                numel = self.slots.segment(slot, segment, self.segments).numel()
                arrived[slot].append((src, data[start : start + numel], reduce))
                start += numel
        for chunk, into, reduce in step.local:
            value = self.slots.segment(chunk, segment, self.segments).clone()
            arrived[into].append((self.program.rank, value, reduce))
        return arrived

    def _add(self, into: Tensor, values: list[tuple[int, Tensor]]) -> None:
        if len(values) == 1:
            self.op.combine(into, values[0][1])
            return
        ordered = sorted([*values, (self.program.rank, into)], key=lambda pair: pair[0])
        total = ordered[0][1]
        for _, value in ordered[1:]:
            self.op.combine(total, value)
        if total is not into:
            into.copy_(total)
