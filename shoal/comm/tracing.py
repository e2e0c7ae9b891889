"""An executor that records a span for every operation and for every wait.

    comm   ··[ reduce: all_reduce ring 4096 bytes ]····     when the operation ran
    main   [ backward ]··········[ wait ]·[ update ]···     when the computation waited for it

A wait is communication that is exposed; an operation beside computation is hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.call import Call, PeerMessage, sent_bytes
from shoal.comm.executor import Executor
from shoal.comm.group import Group
from shoal.comm.transport.shm.messages import ANY_SOURCE
from shoal.comm.transport.transport import Work, Works
from shoal.runtime import clock
from shoal.runtime.trace import ISSUED, WAIT, Tracer


@dataclass(eq=False)
class TracedWork:
    """Records the wait, and when the operation itself ran; the first time that it ends."""

    _work: Work
    _tracer: Tracer
    _kind: str
    _describe: Callable[[], str]
    _start_ns: int  # counts where the work does not know its times; 0: it is not recorded
    _bytes: int
    _peer: int | None
    _call: str
    _is_recorded: bool = False

    def wait(self) -> None:
        if self._is_recorded:
            self._work.wait()
            return
        wait_ns = clock.monotonic_ns()
        detail = ""
        try:
            self._work.wait()
            detail = self._describe()
            self._record(detail)
        finally:
            self._is_recorded = True
            end_ns = clock.monotonic_ns()
            self._tracer.add(WAIT, wait_ns, end_ns, "main", detail, None, 0, self._peer, self._call)

    def _record(self, detail: str) -> None:
        times: tuple[int, int] | None = getattr(self._work, "times", None)
        if times is None and self._start_ns:
            times = (self._start_ns, clock.monotonic_ns())
        if times is not None:
            start_ns, end_ns = times
            self._tracer.add(
                self._kind,
                start_ns,
                end_ns,
                "comm",
                detail,
                None,
                self._bytes,
                self._peer,
                self._call,
            )


class Traced(Executor):
    """Passes calls on and records them with `tracer`."""

    def __init__(self, executor: Executor, tracer: Tracer, members: Sequence[int] | None = None):
        """`members` are the ranks of a group of some, in the numbers of all; None: all of them."""
        executor.record_times()
        self._executor = executor
        self._tracer = tracer
        self._members = range(executor.size) if members is None else members
        self._among = "" if members is None else f" among {','.join(map(str, members))}"
        self._calls = Counter[str]()  # ranks count alike: it names what they do together
        self.rank = executor.rank
        self.size = executor.size
        self.any_source = executor.any_source
        self.takes_cores = executor.takes_cores
        self.may_share = executor.may_share
        self.in_order = executor.in_order
        self.few_large = executor.few_large

    def submit(self, call: Call) -> Work:
        num_bytes = sent_bytes(call, self.rank, self.size)
        self._tracer.sent.total += num_bytes
        number = self._number(",".join(map(str, self._members)))
        start_ns = clock.monotonic_ns()
        work = self._executor.submit(call)
        kind = "gather" if call.kind == "all_gather" else "reduce"
        return TracedWork(
            work, self._tracer, kind, lambda: self.describe(call), start_ns, num_bytes, None, number
        )

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        traced = self._sending(data, dst, tag)
        return traced(self._executor.send(data, dst, tag))

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        traced = self._receiving(into, src, tag)
        return traced(self._executor.recv(into, src, tag))

    def exchange(self, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage]) -> Work:
        """Where it is one operation, all of its messages end when it does."""
        if not self.in_order:
            return super().exchange(sends, receives)
        traced = [self._sending(m.data, m.peer, m.tag) for m in sends]
        traced += [self._receiving(m.data, m.peer, m.tag) for m in receives]
        work = self._executor.exchange(sends, receives)
        return Works([each(work) for each in traced])

    def _sending(self, data: Tensor, dst: int, tag: int) -> Callable[[Work], TracedWork]:
        peer = self._members[dst]
        detail = f"send {data.nbytes} bytes to {peer}"
        number = self._number(f"{self._members[self.rank]} to {peer}, tag {tag}")
        self._mark("send", detail, data.nbytes, peer, number)
        self._tracer.sent.total += data.nbytes
        return lambda work: TracedWork(
            work, self._tracer, "send", lambda: detail, 0, data.nbytes, peer, number
        )

    def _receiving(self, into: Tensor, src: int, tag: int) -> Callable[[Work], TracedWork]:
        peer = None if src == ANY_SOURCE else self._members[src]
        detail = f"receive {into.nbytes} bytes from {'any rank' if peer is None else peer}"
        number = self._number(f"{peer} to {self._members[self.rank]}, tag {tag}")
        self._mark("receive", detail, 0, peer, number)
        return lambda work: TracedWork(
            work, self._tracer, "receive", lambda: detail, 0, 0, peer, number
        )

    def split(self, ranks: Sequence[int]) -> Traced | None:
        child = self._executor.split(ranks)
        is_part = len(ranks) < self.size or bool(self._among)
        members = [self._members[rank] for rank in ranks] if is_part else None
        return None if child is None else Traced(child, self._tracer, members)

    def _number(self, what: str) -> str:
        self._calls[what] += 1
        return f"{what} #{self._calls[what]}"

    def _mark(self, kind: str, detail: str, num_bytes: int, peer: int | None, call: str) -> None:
        """The moment at which a message is handed over."""
        now_ns = clock.monotonic_ns()
        self._tracer.add(kind, now_ns, now_ns, ISSUED, detail, None, num_bytes, peer, call)

    def close(self) -> None:
        self._executor.close()

    def describe(self, call: Call) -> str:
        return self._executor.describe(call) + self._among

    def bytes_sent(self, call: Call) -> int | None:
        return self._executor.bytes_sent(call)


_ROUND_TRIPS = 16


def common_origin_ns(group: Group, is_one_host: bool) -> int:
    """One moment on the monotonic clock of every rank; all ranks call it.

    Processes of a host share the clock. Between hosts rank 0 asks each rank for the time: the
    answer that came back soonest was given in the middle between question and answer, up to half
    of that round trip.
    """
    origin = torch.tensor([clock.monotonic_ns()])
    if is_one_host or group.size == 1:
        group.broadcast(origin).wait()
        return int(origin)
    if group.rank:
        for _ in range(_ROUND_TRIPS):
            group.recv(origin, 0).wait()
            group.send(torch.tensor([clock.monotonic_ns()]), 0).wait()
        group.recv(origin, 0).wait()
        return int(origin)
    answer = torch.empty_like(origin)
    for rank in range(1, group.size):
        offsets = []
        for _ in range(_ROUND_TRIPS):
            asked_ns = clock.monotonic_ns()
            group.send(origin, rank).wait()
            group.recv(answer, rank).wait()
            trip_ns = clock.monotonic_ns() - asked_ns
            offsets.append((trip_ns, int(answer) - asked_ns - trip_ns // 2))
        group.send(origin + min(offsets)[1], rank).wait()
    return int(origin)
