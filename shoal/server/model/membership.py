"""The workers of one model: which have joined, left or been lost, and waiting for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.runtime.waits import waiting
from shoal.server.consistency import Rule
from shoal.server.embedding.row_copy import Rows
from shoal.server.messages import Entered
from shoal.server.model.shard import PushBuffer
from shoal.server.protocol import Channel, Refused, generation_of
from shoal.server.shared_memory import WorkerSegment

_START_BARRIERS = 1 << 20  # barriers up to this number belong to the start of a model
POLL_S = 0.1  # how often to look for workers that have exited


class ModelFailure(Exception):
    """The run cannot go on: a worker that the rule needs was lost, or a server was."""

    def __init__(self, reason: str, worker: int | None = None, is_loss: bool = False):
        """`is_loss`: the cause is the end of a server, which another error reports."""
        self.reason = reason
        self.worker = worker
        self.is_loss = is_loss
        super().__init__(reason)


class ActiveConnection(NamedTuple):
    """The connection that serves one channel of a worker."""

    thread: int  # that reads from it
    abort: Callable[[], None]
    number: int  # connections are numbered in the order in which they were accepted


@dataclass
class Member:
    """One worker that has joined."""

    worker: int
    incarnation: int
    pushes: PushBuffer
    inbox: Tensor | None = None  # where it reads pulls, if it shares memory; else they are sent
    sees_weights: bool = False  # they are in memory of all workers, and are not copied
    _outbox: Tensor | None = None
    out: Tensor | None = None  # where the worker writes its pushes, if it shares that memory
    offered: WorkerSegment | None = None  # memory on a GPU that it has not accepted yet
    channels: dict[Channel, ActiveConnection] = field(default_factory=dict)
    broken: set[Channel] = field(default_factory=set)  # channels that have lost a connection
    row_memory: dict[int, Rows] = field(default_factory=dict)  # for rows that it pulls
    residual: bytearray | None = None  # what compression has not sent yet, as last saved
    barriers: int = 0  # that it has reached
    has_left: bool = False
    comes_back: bool = False  # in the place of a process that was lost; not live yet
    is_late: bool = False  # it was not at the start of the model
    entered: Entered | None = None  # the answer to its return

    @property
    def shares_memory(self) -> bool:
        return self.inbox is not None or self.out is not None

    def fill(self, source: Tensor) -> Tensor | None:
        """Copy into the shared memory; or into private memory that has to be sent."""
        if self.inbox is not None:
            self.inbox.copy_(source)
            if self.inbox.is_cuda:  # another process reads it after the answer
                torch.cuda.current_stream(self.inbox.device).synchronize()
            return None
        if self._outbox is None:
            self._outbox = torch.empty_like(source, device="cpu")
        return self._outbox.copy_(source)


class Membership:
    """Joins, departures and barriers, under the model's lock.

    `has_exited(worker)` tells whether a worker that is not connected never will be.
    `on_departure(worker)` is called under the lock when a worker has left or was lost.
    `on_loss(worker, reason)` is called under the lock when a worker that others wait for is
    gone; it leads to `record_loss`, at once or later.
    """

    def __init__(self, lock: threading.Condition, rule: Rule):
        self.members: dict[int, Member] = {}
        self.departed: set[int] = set()
        self.failure: ModelFailure | None = None
        self.displaced: set[int] = set()  # threads of connections that were replaced
        self.has_exited: Callable[[int], bool] | None = None
        self.on_departure: Callable[[int], None] = lambda worker: None
        self.on_loss: Callable[[int, str], None] = self.record_loss
        self.lock = lock
        self._rule = rule
        self.open_barriers: dict[int, Sequence[int] | None] = {}  # generations, as above
        self.lowest_at: dict[int, int] = {}  # barrier -> lowest surviving worker

    # ------------------------------------------------------------------ joining and leaving

    def join(self, member: Member) -> None:
        with self.lock:
            workers = self._rule.workers
            known = self.members.get(member.worker)
            # it was started after the process that is known, which had not finished
            is_expected = known is None or (
                not known.has_left
                and generation_of(member.incarnation) > generation_of(known.incarnation)
            )
            if member.worker >= workers or not is_expected:
                raise Refused(f"worker {member.worker} of {workers} is not expected here")
            if known is not None and member.worker not in self.departed:
                self.record_loss(member.worker, f"worker {member.worker} was started again")
            member.comes_back = member.worker in self.departed
            self.members[member.worker] = member
            if known is not None:
                self.lock.notify_all()

    def enter(self, worker: int) -> None:
        """A worker that came back takes its place: the others wait for it again."""
        with self.lock:
            member = self.members[worker]
            member.comes_back = False
            member.is_late = True
            self.departed.discard(worker)
            self.lock.notify_all()

    def residual_of(self, worker: int) -> bytearray | None:
        """What a live worker has deposited."""
        with self.lock:
            member = self.members.get(worker)
            return None if member is None or worker in self.departed else member.residual

    def leave(self, worker: int) -> None:
        """A worker has finished its steps."""
        with self.lock:
            self.members[worker].has_left = True
            self._depart(worker)

    def lose(self, worker: int, incarnation: int | None = None) -> None:
        """A connection has broken, unless it was of an earlier process of this worker."""
        with self.lock:
            member = self.members.get(worker)
            is_former = incarnation not in (None, member and member.incarnation)
            if member is not None and not is_former and worker not in self.departed:
                self.on_loss(worker, f"worker {worker} was lost")

    def lose_absent(self) -> None:
        """Do not wait for workers that exited before they joined."""
        with self.lock:
            for worker in self._absent():
                if self.has_exited is not None and self.has_exited(worker):
                    self.on_loss(worker, f"worker {worker} exited before it joined")

    def record_loss(self, worker: int, reason: str) -> None:
        """A worker does not come back; has no effect if it has departed."""
        with self.lock:
            if worker in self.departed or worker >= self._rule.workers:
                return
            if self._rule.is_synchronous:
                self.fail(ModelFailure(reason, worker))
            self._depart(worker)

    def reach(self, worker: int, number: int, generations: Sequence[int] | None = None) -> None:
        """A worker is at a barrier."""
        with self.lock:
            self.members[worker].barriers = number
            if number not in self.lowest_at:
                self.open_barriers.setdefault(number, generations)
            self._complete_barriers()

    def fail(self, failure: ModelFailure) -> None:
        """The first failure stays; every wait ends with it."""
        with self.lock:
            if self.failure is None:
                self.failure = failure
            self.lock.notify_all()

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    # ------------------------------------------------------------------ who is there

    @property
    def is_over(self) -> bool:
        return len(self.departed) == self._rule.workers

    @property
    def is_finished(self) -> bool:
        """Every worker has departed, and one of them at the end of its steps."""
        return self.is_over and any(self.has_left(w) for w in self.departed)

    @property
    def lost(self) -> list[int]:
        """Workers that departed without leaving."""
        return sorted(w for w in self.departed if not self.has_left(w))

    @property
    def lowest_survivor(self) -> int:
        """The lowest worker that was not lost."""
        return min(set(range(self._rule.workers)) - set(self.lost), default=0)

    @property
    def are_from_start(self) -> set[int]:
        """Live workers that have been there since the start of the model, or will be."""
        return self._present(0, None)

    def has_left(self, worker: int) -> bool:
        return worker in self.members and self.members[worker].has_left

    # ------------------------------------------------------------------ waiting

    def wait_barrier(
        self, worker: int, number: int, generations: Sequence[int] | None = None
    ) -> int:
        """Wait until every live worker that takes part has reached it; the lowest of them."""

        late = -1

        def is_reached() -> bool:
            nonlocal late
            if number in self.lowest_at:
                return True
            if not self._is_awaited(late, number, generations):  # else it needs no look at all
                late = next(self._missing(number, generations), -1)
            return late < 0

        with self.lock:
            missing = lambda: sorted(self._missing(number, generations))  # noqa: E731
            self.wait(worker, is_reached, missing, "a barrier")
            self.check()
            if number in self.lowest_at:
                return self.lowest_at[number]
            return min(self._present(number, generations), default=worker)

    def wait(
        self,
        worker: int,
        ready: Callable[[], bool],
        missing: Callable[[], list[int]] = lambda: [],
        doing: str = "an update",
    ) -> None:
        """Wait for a worker, which misses others. ModelFailure if the model fails or it departs."""

        def whom() -> str:
            with self.lock:
                return " and ".join(f"worker {late}" for late in missing()) or "the leader"

        def give_up(seconds: float) -> None:
            with self.lock:
                for late in set(missing()) - self.departed:
                    self.on_loss(late, f"worker {late} was lost: nothing came for {seconds:.1f} s")

        with waiting(f"worker {worker}", whom, doing, give_up):
            self._wait(worker, ready)

    def _wait(self, worker: int, ready: Callable[[], bool]) -> None:
        member = self.members.get(worker)

        def is_former() -> bool:
            return self.members.get(worker) is not member

        def has_left() -> bool:
            """One that has come back is back here when the log says so, which may be later."""
            comes_back = member is not None and member.comes_back
            return worker in self.departed and not comes_back

        is_displaced = self._displaced_here()

        def is_decided() -> bool:
            is_stopped = self.failure is not None or has_left() or is_former()
            return is_stopped or is_displaced() or ready()

        while not self.lock.wait_for(is_decided, self._poll_s()):
            self.lose_absent()
        if is_former():
            raise ModelFailure(f"worker {worker} was started again")
        if is_displaced():
            raise ModelFailure(f"worker {worker} has opened another connection")
        if not ready():
            self.check()
            raise ModelFailure(f"worker {worker} has left")

    def wait_over(self) -> None:
        """Wait until every worker has departed, or the model has failed."""
        is_displaced = self._displaced_here()

        def is_decided() -> bool:
            return self.is_over or self.failure is not None or is_displaced()

        with self.lock:
            while not self.lock.wait_for(is_decided, self._poll_s()):
                self.lose_absent()

    # ------------------------------------------------------------------ under the lock

    def _depart(self, worker: int) -> None:
        self.departed.add(worker)
        if worker in self.members:
            self.members[worker].row_memory.clear()
        self.on_departure(worker)
        self._complete_barriers()
        self.lock.notify_all()

    def _live(self) -> set[int]:
        return set(range(self._rule.workers)) - self.departed

    def _absent(self) -> set[int]:
        have_joined = len(self.members) == self._rule.workers
        return set() if have_joined else self._live() - self.members.keys()

    def _present(self, number: int, generations: Sequence[int] | None) -> set[int]:
        """Live workers that take part: the processes of these generations, or all but late ones."""
        members = self.members
        if generations is None:
            is_start = number <= _START_BARRIERS
            late = {w for w, member in members.items() if member.is_late and is_start}
            return self._live() - late
        named = dict(enumerate(generations))
        known = {w: generation_of(members[w].incarnation) for w in self._live() if w in members}
        return {w for w, generation in known.items() if generation == named.get(w)}

    def _missing(self, number: int, generations: Sequence[int] | None) -> Iterator[int]:
        """Those of them that have not reached it; first the one that is often the last to come."""
        workers = reversed(range(self._rule.workers))
        return (w for w in workers if self._is_awaited(w, number, generations))

    def _is_awaited(self, worker: int, number: int, generations: Sequence[int] | None) -> bool:
        member = self.members.get(worker)
        if worker < 0 or worker in self.departed:
            return False
        if member is None:
            return generations is None
        if member.barriers >= number:
            return False
        if generations is None:
            return not member.is_late or number > _START_BARRIERS
        named = generations[worker : worker + 1]
        return list(named) == [generation_of(member.incarnation)]

    def _complete_barriers(self) -> None:
        """Fix the lowest survivor of each barrier that all live workers have reached."""
        for number, generations in sorted(self.open_barriers.items()):
            if next(self._missing(number, generations), None) is None:
                self.lowest_at[number] = min(self._present(number, generations), default=0)
                self.lowest_at.pop(number - 2, None)
                del self.open_barriers[number]
                self.lock.notify_all()

    def _displaced_here(self) -> Callable[[], bool]:
        """Whether the connection of this thread was replaced; another one may ask it."""
        thread = threading.get_ident()
        return lambda: thread in self.displaced

    def _poll_s(self) -> float | None:
        """A worker that exits before it joins wakes no thread: look for it from time to time."""
        return POLL_S if self.has_exited is not None and self._absent() else None
