"""Collectives of the ranks of one host: they run natively through shared memory.

    all_reduce    up to 16 KB: every rank reads all contributions; 1 round of flags
                  above: in chunks; every rank reduces a slice of a chunk and takes the others'
    the others    every rank writes what others need into its slot and reads what it needs

Results of a reduction are the same bits on every rank: contributions go in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.comm.call import (
    DTYPE_CODES,
    KIND_CODES,
    Call,
    Op,
    Operand,
    fill_identity,
    moved_as,
    reduced_natively,
)
from shoal.comm.executor import Executor, Shortcut
from shoal.comm.group import Group
from shoal.comm.objects import all_gather_bytes
from shoal.comm.staging import check_counts, counts_row, counts_table, on_host, share_storage
from shoal.comm.transport.shm.messages import ShmTransport, ShmWork
from shoal.comm.transport.shm.segment import Segment, is_built, join
from shoal.comm.transport.transport import Work
from shoal.comm.work_queue import QueuedWork, WorkQueue
from shoal.errors import BadInput, ShoalError
from shoal.runtime.trace import SentBytes

if TYPE_CHECKING:
    from shoal.comm.executors.shared_gpu import SharedGpu

if is_built():
    from shoal.comm.transport.shm import _shm

# kind, address in, address out, count, type, operator, root
NativeArguments = tuple[int, int, int, int, int, int, int]


class NativeWork(QueuedWork):
    """One call of a native collective: light ones are begun in the call (see `WorkQueue`)."""

    __slots__ = ("_after", "_keep", "_segment")
    begin = _shm.start if is_built() else QueuedWork.begin

    def __init__(
        self,
        queue: WorkQueue,
        segment: Segment,
        arguments: tuple[Any, ...],
        keep: object = None,
        after: Callable[[], None] | None = None,
    ):
        """`keep` is what must stay in memory, `after` is done when the numbers have arrived."""
        self.queue = queue
        self.is_done = False
        self.error = None
        self.callbacks = None
        self.arguments = arguments
        self._segment = segment
        self._after = after
        self._keep = keep

    def run(self) -> None:
        segment = self._segment
        if self.begun:
            outcome = _shm.finish(segment.handle, segment.timeout_ns)
        else:
            outcome = _shm.collective(*self.arguments, segment.timeout_ns)  # type: ignore[call-arg]
        if outcome:
            segment.check(outcome)
        if self._after is not None:
            self._after()
        self._keep = self._after = None


class LightWork(_shm.LightWork if is_built() else object):  # type: ignore[misc]
    """An all-reduce that a lane has begun, beside the queue; see `light_lane` of `_shm`."""

    __slots__ = ()
    poll = QueuedWork.poll  # a timed queue has none
    when_done = QueuedWork.when_done
    times = None


_REDUCTIONS = ("reduce", "all_reduce", "reduce_scatter", "scan", "exclusive_scan")
_ON_GPU = frozenset(("all_reduce", "reduce_scatter", "all_gather", "broadcast"))
_IN_PLACE = frozenset(("broadcast", "reduce", "all_reduce", "scan"))


class SharedMemory(Executor):
    """Collectives through a segment."""

    any_source = True

    def __init__(self, segment: Segment, takes_cores: bool = False):
        self.segment = segment
        self.takes_cores = takes_cores
        self.rank = segment.rank
        self.size = segment.size
        self.transport = ShmTransport(segment)
        self.queue = WorkQueue("shoal collectives")
        self._children: list[SharedMemory] = []
        self._gpu: SharedGpu | None = None
        self._asks_gpu = True  # whether ranks share one is not known yet

    @property
    def timeout_s(self) -> float:
        """How long an operation waits for the other ranks."""
        return self.segment.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self.segment.timeout_s = timeout_s
        self.segment.timeout_ns = int(timeout_s * 1e9)

    # ------------------------------------------------------------------ point to point

    def send(self, data: Tensor, dst: int, tag: int) -> ShmWork:
        return self.transport.send(on_host(data).flat, dst, tag)

    def recv(self, into: Tensor, src: int, tag: int) -> ShmWork:
        target = on_host(into)
        return self.transport.recv(target.flat, src, tag, target.store)

    # ------------------------------------------------------------------ collectives

    def shortcuts(
        self, all_reduce: Shortcut, broadcast: Shortcut, sent: SentBytes | None
    ) -> dict[str, Shortcut]:
        """Plain numbers in the host's memory, in place: straight to the native call."""
        size = self.size
        segment = self.segment
        handle = segment.handle
        queue = self.queue
        submit = queue.submit
        sum_kind = KIND_CODES["all_reduce"]
        root_kind = KIND_CODES["broadcast"]
        codes = DTYPE_CODES.get
        total = Op.SUM

        def short_all_reduce(data: Tensor, op: Op = total, out: Tensor | None = None) -> Work:
            code = codes(data.dtype)
            plain = out is None and code is not None and (op is total or not op.is_bitwise)
            if plain and data.is_cpu and data.is_contiguous() and not segment.closed:
                at = data.data_ptr()
                if sent is not None:
                    sent.total += round(2 * data.nbytes * (size - 1) / size)
                args = (handle, sum_kind, at, at, data.numel(), code, op.code, 0, 0)
                work = NativeWork(queue, segment, args, data)
                submit(work)
                return work
            return all_reduce(data, op, out)

        def short_broadcast(data: Tensor, root: int = 0) -> Work:
            code = codes(data.dtype)
            plain = code is not None and 0 <= root < size and not segment.closed
            if plain and data.is_cpu and data.is_contiguous():
                at = data.data_ptr()
                args = (handle, root_kind, at, at, data.numel(), code, 0, root, 0)
                work = NativeWork(queue, segment, args, data)
                submit(work)
                return work
            return broadcast(data, root)

        if sent is not None:
            return {"all_reduce": short_all_reduce}
        return {"all_reduce": self._lane(short_all_reduce), "broadcast": short_broadcast}

    def _lane(self, otherwise: Shortcut) -> Shortcut:
        """Sums in place that are light, and begun while the queue is idle, natively."""
        if self.queue.take_light is not None:  # one lane a queue
            return otherwise
        lane = self.queue.light_lane(
            partial(_shm.lane, self.segment, self.segment.handle), DTYPE_CODES, LightWork, otherwise
        )
        all_reduce: Shortcut = lane.all_reduce
        return all_reduce

    def submit(self, call: Call) -> QueuedWork:
        kind, data, out, op, root, _, _, timeout_s = call
        if self.device is not None and kind in _ON_GPU:
            work = self._on_gpu(call, self.device)
            if work is not None:
                return work
        if data is out and kind in _IN_PLACE and isinstance(data, Tensor):
            code = DTYPE_CODES.get(data.dtype)
            if code is not None and data.is_cpu and data.is_contiguous():
                at = data.data_ptr()
                args = (KIND_CODES[kind], at, at, data.numel(), code, op.code, root)
                return self._start(args, timeout_s, data)
        if kind == "barrier":
            return self._start((0, 0, 0, 0, 0, 0, 0), timeout_s)
        if kind == "all_to_all_uneven":
            return self._all_to_all_uneven(call)
        return self._with_operands(call)

    def _on_gpu(self, call: Call, device: torch.device) -> QueuedWork | None:
        """None where the host's memory serves the call."""
        if not isinstance(call.data, Tensor) or call.data.device != device:
            return None
        if self._asks_gpu:
            from shoal.comm.executors.shared_gpu import share

            self._asks_gpu = False
            self._gpu = share(self, device)
        return None if self._gpu is None else self._gpu.submit(call)

    def exchange_now(self, mine: Tensor, everything: Tensor, timeout_s: float | None) -> None:
        """An all-gather of numbers of 64 bits, within an operation of the queue."""
        segment = self.segment if timeout_s is None else self.segment.within(timeout_s)
        count = mine.numel()
        code = DTYPE_CODES[mine.dtype]
        at = mine.data_ptr()
        to = everything.data_ptr()
        if outcome := _shm.collective(
            segment.handle,
            KIND_CODES["all_gather"],
            at,
            to,
            count,
            code,
            0,
            0,
            0,
            segment.timeout_ns,
        ):
            segment.check(outcome)

    def _with_operands(self, call: Call) -> QueuedWork:
        data = call.out if call.data is None else call.data
        out = call.out
        if not isinstance(data, Tensor) or isinstance(out, list) or not _is_plain(data, out):
            return self._with_staging(call)
        code = DTYPE_CODES.get(data.dtype)
        if code is None or call.kind == "exclusive_scan":
            return self._with_staging(call)
        source = data.data_ptr()
        target = 0 if out is None else out.data_ptr()
        count = self._count(call, data)
        args = (KIND_CODES[call.kind], source, target, count, code, call.op.code, call.root)
        return self._start(args, call.timeout_s, (data, out))

    def _with_staging(self, call: Call) -> QueuedWork:
        """Tensors that are not contiguous or not in the host's memory, types of others, and pieces.

        Pieces lie anywhere; the native call takes a table of their addresses.
        """
        data = call.out if call.data is None else call.data
        out = call.out
        copy = isinstance(data, Tensor) and isinstance(out, Tensor) and _overlap(out, data)
        given = [on_host(piece, copy) for piece in _listed(data)]
        taken = given if out is data else [on_host(piece) for piece in _listed(out)]
        lists = [p for p, operand in ((given, data), (taken, out)) if isinstance(operand, list)]
        addresses = [piece.flat.data_ptr() for pieces in lists for piece in pieces]
        first = given[0].flat
        is_reduced = call.kind in _REDUCTIONS
        number = reduced_natively(first.dtype, call.op) if is_reduced else moved_as(first.dtype)
        count = self._count(call, data) if isinstance(data, Tensor) else first.numel()
        kind = KIND_CODES[call.kind]
        target = taken[0].flat.data_ptr() if taken else 0
        sizes = (count * number.width, number.code, number.op, call.root)

        def store() -> None:
            for piece in taken:
                piece.store()
            if call.kind == "exclusive_scan" and self.rank == 0:
                assert isinstance(out, Tensor)
                fill_identity(out.detach(), call.op)

        table = torch.tensor(addresses) if addresses else None
        args = (kind, first.data_ptr(), target, *sizes)
        return self._start(args, call.timeout_s, (given, taken), store, table)

    def _count(self, call: Call, data: Tensor) -> int:
        """Elements of a vector, or of the piece of a rank."""
        if call.kind in ("scatter", "reduce_scatter"):
            assert isinstance(call.out, Tensor)
            return call.out.numel()
        return data.numel() // self.size if call.kind == "all_to_all" else data.numel()

    def _all_to_all_uneven(self, call: Call) -> QueuedWork:
        assert isinstance(call.data, Tensor) and isinstance(call.out, Tensor)
        counts = counts_table(self.size)
        said = Call("all_gather", counts_row(call), counts, timeout_s=call.timeout_s)
        self.submit(said).wait()
        check_counts(counts)
        longest = counts[:, 1:].max()
        unit = call.data.element_size()
        number = moved_as(call.data.dtype)
        rows = [
            _offsets(call.send_counts),
            call.send_counts,
            _offsets(call.recv_counts),
            call.recv_counts,
        ]
        table = (torch.tensor(rows) * unit).t().contiguous()
        source = on_host(call.data)
        target = on_host(call.out)
        count = int(longest) * number.width
        kind = KIND_CODES[call.kind]
        args = (kind, source.flat.data_ptr(), target.flat.data_ptr(), count, number.code, 0, 0)
        return self._start(args, call.timeout_s, (source, target), target.store, table)

    def _start(
        self,
        args: NativeArguments,
        timeout_s: float | None = None,
        keep: object = None,
        after: Callable[[], None] | None = None,
        table: Tensor | None = None,
    ) -> QueuedWork:
        segment = self.segment
        if segment.closed:
            raise ShoalError(f"rank {self.rank} has closed this group")
        if timeout_s is not None:
            segment = segment.within(timeout_s)
        address = 0 if table is None else table.data_ptr()
        arguments = (segment.handle, *args, address)
        work = NativeWork(self.queue, segment, arguments, (keep, table), after)
        self.queue.submit(work)
        return work

    # ------------------------------------------------------------------ the life of a group

    def split(self, ranks: Sequence[int]) -> SharedMemory | None:
        ranks = list(ranks)
        group = Group(self)
        if self.rank not in ranks:
            for _ in range(2):  # `join` exchanges twice
                all_gather_bytes(group, b"")
            return None

        def exchange(said: bytes) -> list[bytes]:
            everything = all_gather_bytes(group, said)
            return [everything[rank] for rank in ranks]

        segment = join(
            exchange,
            ranks.index(self.rank),
            len(ranks),
            self.segment.timeout_s,
            run_dir=self.segment.run_dir,
            explains=self.segment.explains,
        )
        if segment is None:
            raise BadInput("there is no memory left for another group of these ranks")
        child = SharedMemory(segment, self.takes_cores)
        child.device = self.device
        self._children.append(child)
        return child

    def close(self) -> None:
        for child in self._children:
            child.close()
        if not self.segment.closed:
            self.segment.leave()
            self.queue.close()
            self.transport.close()
            self.segment.close()

    def describe(self, call: Call) -> str:
        return f"{call.kind} shared memory {call.num_bytes} bytes"

    def record_times(self) -> None:
        self.queue.timed = True


def _is_plain(data: Tensor, out: Tensor | None) -> bool:
    """Whether the native call can use the tensors as they are."""
    if not (data.is_cpu and data.is_contiguous()):
        return False
    if out is data or out is None:
        return True
    return out.is_cpu and out.is_contiguous() and not _overlap(out, data)


def _overlap(out: Tensor, data: Tensor) -> bool:
    """Whether the native call would read what it has written; it allows one address for both."""
    to = out.data_ptr()
    at = data.data_ptr()
    if to == at or not (out.is_cpu and data.is_cpu):
        return False
    if out.is_contiguous() and data.is_contiguous():
        return to < at + data.nbytes and at < to + out.nbytes
    return share_storage(out, data)


def _listed(operand: Operand | None) -> list[Tensor]:
    if operand is None:
        return []
    return [operand] if isinstance(operand, Tensor) else operand


def _offsets(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:rank]) for rank in range(len(counts))]
