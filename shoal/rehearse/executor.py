"""Collectives and messages of virtual ranks: computed at once, timed by the links of the cluster.

A collective begins when the last rank has called it, and ends on all ranks when its messages have
arrived. Those of a group follow each other; those of other groups, and messages, share the links.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shoal.comm.call import Call
from shoal.comm.executor import Executor
from shoal.errors import ShoalError
from shoal.rehearse.arithmetic import carry_out
from shoal.rehearse.network import (
    Phase,
    VirtualMessage,
    VirtualNetwork,
    phases_of,
    phases_of_schedule,
)
from shoal.rehearse.virtual_time import Fiber, VirtualTime
from shoal.schedules.collectives.catalog import build, proven_collective
from shoal.schedules.user import is_user_function
from shoal.transport.transport import DoneWork, Work

GroupKey = tuple[object, ...]
MessageKey = tuple[GroupKey, int, int, int]


class VirtualWork:
    """Ends when it is told to; any number of fibers may wait for it."""

    def __init__(self, time: VirtualTime, doing: str):
        self._time = time
        self._doing = doing
        self._waiting: list[Fiber] = []
        self.is_done = False
        self.error: BaseException | None = None
        self.start_ns = round(time.now_s * 1e9)
        self.times: tuple[int, int] | None = None
        self._finish: Callable[[], None] | None = None

    def end(self, error: BaseException | None = None) -> None:
        self.is_done, self.error = True, error
        self.times = (self.start_ns, round(self._time.now_s * 1e9))
        for fiber in self._waiting:
            self._time.wake(fiber)

    def poll(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        while not self.is_done:
            self._waiting.append(self._time.current)
            self._time.park(self._doing)
        if self.error is not None:
            raise self.error


@dataclass
class _Meeting:
    """One collective: the calls that have come, by rank."""

    calls: dict[int, Call] = field(default_factory=dict)
    works: list[VirtualWork] = field(default_factory=list)


class _GroupState:
    """The collectives of a group, which are carried out one after the other."""

    def __init__(self) -> None:
        self.meetings: dict[int, _Meeting] = {}
        self.complete: deque[_Meeting] = deque()
        self.is_busy = False


class VirtualRanks:
    """What the ranks of a world share: groups, mailboxes and the network."""

    def __init__(
        self, network: VirtualNetwork, time: VirtualTime, devices: Sequence[int], algorithm: str
    ):
        """`devices[r]` is where rank r is; `algorithm` is that of an all-reduce, or "auto"."""
        self.network = network
        self.time = time
        self.devices = tuple(devices)
        self._algorithm = algorithm
        self._groups: dict[GroupKey, _GroupState] = defaultdict(_GroupState)
        self._boxes: dict[MessageKey, deque[_Flight]] = defaultdict(deque)
        self._receivers: dict[MessageKey, deque[_Receiver]] = defaultdict(deque)

    def meet(
        self, key: GroupKey, ranks: tuple[int, ...], number: int, rank: int, call: Call
    ) -> VirtualWork:
        group = self._groups[key]
        meeting = group.meetings.setdefault(number, _Meeting())
        work = VirtualWork(self.time, f"{call.kind} #{number} of ranks {_shown(ranks)}")
        meeting.calls[rank] = call
        meeting.works.append(work)
        if len(meeting.calls) == len(ranks):
            group.complete.append(group.meetings.pop(number))
            self._begin_next(group, ranks)
        return work

    def _begin_next(self, group: _GroupState, ranks: tuple[int, ...]) -> None:
        if group.is_busy or not group.complete:
            return
        group.is_busy = True
        meeting = group.complete.popleft()
        calls = [meeting.calls[rank] for rank in range(len(ranks))]
        error: Exception | None = _different(calls, ranks)
        if error is None:
            try:
                carry_out(calls)
            except Exception as raised:
                error = raised

        def done() -> None:
            group.is_busy = False
            for work in meeting.works:
                work.end(error)
            self._begin_next(group, ranks)

        phases = [] if error is not None else self._phases(calls, ranks)
        self.network.send_phases(phases, done)

    def _phases(self, calls: Sequence[Call], ranks: tuple[int, ...]) -> list[Phase]:
        call = calls[calls[0].root]
        places = [self.devices[rank] for rank in ranks]
        places = places[call.root :] + places[: call.root]  # the root is the first
        if call.kind == "all_reduce" and self._algorithm != "auto":
            return self._of_algorithm(places, call)
        num_bytes = max(each.num_bytes for each in calls)
        inside = self.network.cluster.node.devices
        return phases_of(call.kind, places, num_bytes, inside)

    def _of_algorithm(self, places: Sequence[int], call: Call) -> list[Phase]:
        size, name = len(places), self._algorithm
        if name == "ring":
            return phases_of("all_reduce", places, call.num_bytes, 1)
        own = is_user_function(name)
        collective = (
            proven_collective(name, "all_reduce", size) if own else build("all_reduce", name, size)
        )
        return phases_of_schedule(collective, places, call.num_bytes)

    # ------------------------------------------------------------------ messages

    def send(self, key: MessageKey, src: int, dst: int, data: Tensor) -> None:
        """The bytes are on their way; they arrive in the order in which they were sent."""
        flight = _Flight(data.detach().clone())
        self._boxes[key].append(flight)
        ends = (self.devices[src], self.devices[dst])

        def arrived() -> None:
            flight.has_arrived = True
            self._deliver(key)

        self.network.send([VirtualMessage(*ends, data.nbytes)], arrived)

    def receive(self, key: MessageKey, into: Tensor, doing: str) -> VirtualWork:
        work = VirtualWork(self.time, doing)
        self._receivers[key].append(_Receiver(into, work))
        self._deliver(key)
        return work

    def _deliver(self, key: MessageKey) -> None:
        box, receivers = self._boxes[key], self._receivers[key]
        while box and receivers and box[0].has_arrived:
            data, receiver = box.popleft().data, receivers.popleft()
            into = receiver.into
            error = None
            if data.numel() != into.numel() or data.dtype != into.dtype:
                error = ShoalError(
                    f"expected {into.numel()} {into.dtype}, got {data.numel()} {data.dtype} "
                    f"(message {key[1:]})"
                )
            else:
                into.detach().copy_(data.view(into.shape))
            receiver.work.end(error)


@dataclass
class _Flight:
    data: Tensor
    has_arrived: bool = False


@dataclass
class _Receiver:
    into: Tensor
    work: VirtualWork


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (", …" if len(ranks) > 4 else "")


def _different(calls: Sequence[Call], ranks: Sequence[int]) -> ShoalError | None:
    kinds = [call.kind for call in calls]
    for rank, kind in zip(ranks, kinds, strict=True):
        if kind != kinds[0]:
            return ShoalError(f"rank {ranks[0]} calls {kinds[0]} where rank {rank} calls {kind}")
    return None


class Virtual(Executor):
    """One rank of a group of virtual ranks."""

    def __init__(self, exchange: VirtualRanks, ranks: Sequence[int], rank: int, key: GroupKey = ()):
        self._exchange = exchange
        self._ranks = tuple(ranks)  # of the world
        self._key = key
        self.rank = rank
        self.size = len(self._ranks)
        self._calls = 0
        self._children = 0

    def submit(self, call: Call) -> Work:
        self._calls += 1
        return self._exchange.meet(self._key, self._ranks, self._calls, self.rank, call)

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        key = (self._key, self.rank, dst, tag)
        self._exchange.send(key, self._ranks[self.rank], self._ranks[dst], data)
        return DoneWork()

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        key = (self._key, src, self.rank, tag)
        doing = f"a message of rank {self._ranks[src]}"
        return self._exchange.receive(key, into, doing)

    def split(self, ranks: Sequence[int]) -> Virtual | None:
        self._children += 1
        if self.rank not in ranks:
            return None
        of_world = [self._ranks[rank] for rank in ranks]
        key = (self._key, self._children, tuple(ranks))
        return Virtual(self._exchange, of_world, list(ranks).index(self.rank), key)


def world(exchange: VirtualRanks) -> list[Virtual]:
    """An executor of all ranks, for each of them."""
    ranks = range(len(exchange.devices))
    return [Virtual(exchange, ranks, rank) for rank in ranks]
