"""An executor that records a span for every operation and for every wait.

    comm   ··[ reduce: all_reduce ring 4096 bytes ]····     when the operation ran
    main   [ backward ]··········[ wait ]·[ update ]···     when the computation waited for it

A wait is communication that is exposed; an operation beside computation is hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.comm.call import Call, sent_bytes
from shoal.comm.executor import Executor
from shoal.runtime.trace import ISSUED, WAIT, Tracer
from shoal.transport.transport import Work


@dataclass(eq=False)
class TracedWork:
    """Records the wait, and when the operation itself ran; the first time that it ends."""

    _work: Work
    _tracer: Tracer
    _kind: str
    _describe: Callable[[], str]
    _start_ns: int  # counts where the work does not know its times; 0: it is not recorded
    _is_recorded: bool = False

    def wait(self) -> None:
        if self._is_recorded:
            self._work.wait()
            return
        wait_ns = time.monotonic_ns()
        detail = ""
        try:
            self._work.wait()
            detail = self._describe()
            self._record(detail)
        finally:
            self._is_recorded = True
            self._tracer.add(WAIT, wait_ns, time.monotonic_ns(), "main", detail)

    def _record(self, detail: str) -> None:
        times: tuple[int, int] | None = getattr(self._work, "times", None)
        if times is None and self._start_ns:
            times = (self._start_ns, time.monotonic_ns())
        if times is not None:
            start_ns, end_ns = times
            self._tracer.add(self._kind, start_ns, end_ns, "comm", detail)


class Traced(Executor):
    """Passes calls on and records them with `tracer`."""

    def __init__(self, executor: Executor, tracer: Tracer, members: Sequence[int] | None = None):
        """`members` are the ranks of a group of some, in the numbers of all; None: all of them."""
        executor.record_times()
        self._executor = executor
        self._tracer = tracer
        self._members = range(executor.size) if members is None else members
        self._among = "" if members is None else f" among {','.join(map(str, members))}"
        self.rank = executor.rank
        self.size = executor.size
        self.any_source = executor.any_source
        self.takes_cores = executor.takes_cores

    def submit(self, call: Call) -> Work:
        self._tracer.sent.total += sent_bytes(call, self.rank, self.size)
        start_ns = time.monotonic_ns()
        work = self._executor.submit(call)
        return TracedWork(work, self._tracer, "reduce", lambda: self.describe(call), start_ns)

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        detail = f"send {data.nbytes} bytes to {self._members[dst]}"
        self._mark("send", detail)
        self._tracer.sent.total += data.nbytes
        work = self._executor.send(data, dst, tag)
        return TracedWork(work, self._tracer, "send", lambda: detail, 0)

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        detail = f"receive {into.nbytes} bytes from {self._members[src]}"
        self._mark("receive", detail)
        work = self._executor.recv(into, src, tag)
        return TracedWork(work, self._tracer, "receive", lambda: detail, 0)

    def split(self, ranks: Sequence[int]) -> Traced | None:
        child = self._executor.split(ranks)
        is_part = len(ranks) < self.size or bool(self._among)
        members = [self._members[rank] for rank in ranks] if is_part else None
        return None if child is None else Traced(child, self._tracer, members)

    def _mark(self, kind: str, detail: str) -> None:
        """The moment at which a message is handed over."""
        now_ns = time.monotonic_ns()
        self._tracer.add(kind, now_ns, now_ns, ISSUED, detail)

    def close(self) -> None:
        self._executor.close()

    def describe(self, call: Call) -> str:
        return self._executor.describe(call) + self._among

    def bytes_sent(self, call: Call) -> int | None:
        return self._executor.bytes_sent(call)
