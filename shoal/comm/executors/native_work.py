"""A call of a native collective as an operation of a work queue."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shoal.comm.work_queue import QueuedWork, WorkQueue
from shoal.transport.shm.segment import Segment, is_built

if is_built():
    from shoal.transport.shm import _shm

# kind, address in, address out, count, type, operator, root
NativeArguments = tuple[int, int, int, int, int, int, int]


class NativeWork(QueuedWork):
    """One call of a native collective: light ones are begun in the call (see `WorkQueue`)."""

    __slots__ = ("_after", "_args", "_keep", "_segment", "_table")

    def __init__(
        self,
        queue: WorkQueue,
        segment: Segment,
        args: NativeArguments,
        keep: object = None,
        after: Callable[[], None] | None = None,
        table: Tensor | None = None,
    ):
        """`keep` is what must stay in memory, `after` is done when the numbers have arrived."""
        self.queue = queue
        self.is_done = False
        self.error = None
        self._callbacks = None
        self._segment = segment
        self._args = args
        self._after = after
        self._keep = keep if table is None else (keep, table)
        self._table = 0 if table is None else table.data_ptr()

    def begin(self) -> bool:
        return _shm.start(self._segment.handle, *self._args, self._table)

    def run(self) -> None:
        segment = self._segment
        if self.begun:
            outcome = _shm.finish(segment.handle, segment.timeout_ns)
        else:
            outcome = _shm.collective(segment.handle, *self._args, self._table, segment.timeout_ns)
        if outcome:
            segment.check(outcome)
        if self._after is not None:
            self._after()
        self._keep = self._after = None
