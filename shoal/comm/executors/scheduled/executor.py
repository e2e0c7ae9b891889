"""A group whose collectives are schedules: chosen, proven, and run by one interpreter."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.executors.scheduled import binding
from shoal.comm.executors.scheduled.binding import Call, Place
from shoal.comm.executors.scheduled.buffers import Memory
from shoal.comm.executors.scheduled.calibration import measure_link
from shoal.comm.executors.scheduled.interpreter import SEGMENT_BYTES, Interpreter, segments_for
from shoal.comm.executors.scheduled.program import Program, compile_for
from shoal.comm.executors.scheduled.selection import Choosable, Chooser
from shoal.comm.group import Group, Op, check_root, check_subgroup
from shoal.comm.queue import OrderedQueue
from shoal.observe.trace import OFF, Tracer
from shoal.schedules.collectives.catalog import build
from shoal.schedules.collectives.cost import Link
from shoal.transport.subset import SubsetTransport
from shoal.transport.threads import PendingWork
from shoal.transport.transport import Transport, Work

_SPACE = 1 << 40  # tags of one duplicate; user tags count up from its start, collectives above
_COLLECTIVES = 1 << 39
_MEASURE = 0  # collectives are numbered from 1


class ScheduledGroup:
    """Collectives by schedule over any transport.

    `algorithm` is described at `Chooser`. `link` is what messages cost here; where the algorithm
    is open and `link` is not given, it is measured at the first use. Operations run in the order
    of the calls: when one of them is waited for, or with `background` on a thread from the call
    on, beside the computation. Until they are waited for their tensors must be left alone.
    """

    def __init__(
        self,
        transport: Transport,
        algorithm: Choosable = "auto",
        link: Link | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        background: bool = False,
        tracer: Tracer = OFF,
        space: int = 0,
    ):
        self._transport = transport
        self._algorithm = algorithm
        self._space = space
        self.rank = transport.rank
        self.size = transport.size
        self.link = link
        self._segment_bytes = segment_bytes
        self._chooser = Chooser(algorithm, self.rank, self.size)
        self._background = background
        self._queue = OrderedQueue(background)
        self.tracer = tracer
        self._calls = self._children = 0

    def send(self, data: Tensor, dst: int, tag: int = 0) -> Work:
        """Push: `data` to rank `dst`, which calls `recv` with the same tag."""
        return self._transport.send(data.detach().contiguous(), dst, self._space * _SPACE + tag)

    def recv(self, into: Tensor, src: int, tag: int = 0) -> Work:
        """Pull: what rank `src` sends with this tag."""
        whole = into.detach()
        landing = whole if whole.is_contiguous() else torch.empty_like(whole).contiguous()
        work = self._transport.recv(landing, src, self._space * _SPACE + tag)
        if landing is whole:
            return work

        def finish() -> None:
            work.wait()
            whole.copy_(landing)

        return PendingWork(finish)

    def broadcast(self, data: Tensor, root: int = 0) -> Work:
        return self._start(binding.whole("broadcast", data, Op.SUM, self._place(root)))

    def reduce(self, data: Tensor, root: int = 0, op: Op = Op.SUM) -> Work:
        """The result at the root; the other ranks' tensors are left as they were."""
        return self._start(binding.whole("reduce", data, op, self._place(root)))

    def all_reduce(self, data: Tensor, op: Op = Op.SUM, out: Tensor | None = None) -> Work:
        """Everybody's `data` combined, in its place or in `out`."""
        return self._start(binding.whole("all_reduce", data, op, self._place(), out))

    def gather(self, out: Tensor | None, data: Tensor, root: int = 0) -> Work:
        return self._start(binding.gather(out, data, self._place(root)))

    def scatter(self, out: Tensor, data: Tensor | None, root: int = 0) -> Work:
        return self._start(binding.scatter(out, data, self._place(root)))

    def all_gather(self, out: Tensor, data: Tensor) -> Work:
        return self._start(binding.all_gather(out, data, self._place()))

    def reduce_scatter(self, out: Tensor, data: Tensor, op: Op = Op.SUM) -> Work:
        return self._start(binding.reduce_scatter(out, data, op, self._place()))

    def all_to_all(self, out: Tensor, data: Tensor) -> Work:
        return self._start(binding.all_to_all(out, data, self._place()))

    def scan(
        self, data: Tensor, op: Op = Op.SUM, exclusive: bool = False, out: Tensor | None = None
    ) -> Work:
        """Ranks 0 to r combined at rank r; exclusive: 0 to r-1, and at rank 0 nothing (0, 1, …)."""
        kind = "exclusive_scan" if exclusive else "scan"
        return self._start(binding.whole(kind, data, op, self._place(), out))

    def barrier(self) -> Work:
        token = torch.zeros(1, dtype=torch.int32)
        return self._start(binding.whole("barrier", token, Op.MAX, self._place()))

    def duplicate(self) -> Group:
        return self._child(self._transport)

    def subgroup(self, ranks: Sequence[int]) -> ScheduledGroup | None:
        check_subgroup(ranks, self.size)
        if self.rank not in ranks:
            self._children += 1
            return None
        return self._child(SubsetTransport(self._transport, ranks))

    def sends(self, kind: str, num_bytes: int) -> int | None:
        """Bytes that this rank sends in such a call; None where the algorithm is left open."""
        if self._chooser.is_auto(kind):
            return None
        collective = self._chooser.program(kind, num_bytes, self.link or Link()).collective
        times = sum(transfer.src == self.rank for row in collective.rounds for transfer in row)
        return round(times * collective.chunk_bytes(num_bytes))

    def calibrate(self) -> Link:
        """Measure what a message costs here, and let `auto` go by it. All ranks call it."""
        self._queue.submit(self._measure).wait()
        assert self.link is not None
        return self.link

    def _child(self, transport: Transport) -> ScheduledGroup:
        self._children += 1
        space = self._space << 20 | self._children
        return ScheduledGroup(
            transport,
            self._algorithm,
            self.link,
            self._segment_bytes,
            self._background,
            self.tracer,
            space,
        )

    def _place(self, root: int = 0) -> Place:
        check_root(root, self.size)
        return Place(self.rank, self.size, root)

    def _start(self, call: Call) -> Work:
        self._calls += 1
        tag = self._tag(self._calls)
        return self._queue.submit(lambda: self._carry_out(call, tag))

    def _carry_out(self, call: Call, tag: int) -> None:
        if self.link is None and self._chooser.is_auto(call.kind):
            self._measure()
        link = self.link or Link()
        program = self._chooser.program(call.kind, call.num_bytes, link, call.root)
        start_ns = time.monotonic_ns()
        self._run(program, call, tag)
        detail = f"{call.kind} {program.collective.name} {call.num_bytes} bytes"
        self.tracer.add("reduce", start_ns, time.monotonic_ns(), "comm", detail)

    def _run(self, program: Program, call: Call, tag: int) -> None:
        memory = Memory(program.collective, call.unit_numel, call.like)
        call.bind(memory)
        chunk_bytes = int(program.collective.chunk_bytes(call.num_bytes))
        segments = segments_for(chunk_bytes, self._segment_bytes)
        Interpreter(program, memory, self._transport, tag, call.op, segments).run()
        call.finish()

    def _measure(self) -> None:
        program = compile_for(build("broadcast", "tree", self.size), self.rank)
        tag = self._tag(_MEASURE)

        def tell(found: Tensor) -> None:
            self._run(program, binding.whole("broadcast", found, Op.SUM, self._place()), tag)

        self.link = measure_link(self._transport, tag, tell)

    def _tag(self, number: int) -> int:
        return self._space * _SPACE + _COLLECTIVES + number
