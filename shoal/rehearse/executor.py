"""Collectives and messages of virtual ranks: computed at once, timed by the links of the cluster.

A collective begins when the last rank has called it, and ends on all ranks when its messages have
arrived. Those of a group follow each other; those of other groups, and messages, share the links.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shoal.comm.call import Call
from shoal.comm.executor import Executor
from shoal.comm.executors.solo import Solo
from shoal.comm.members.elastic_group import ElasticGroup
from shoal.comm.members.membership import Generation, GroupMembership
from shoal.comm.transport.shm.memfd import Exchange
from shoal.comm.transport.transport import DoneWork, Work
from shoal.errors import PeerLost, ShoalError
from shoal.rehearse.arithmetic import carry_out
from shoal.rehearse.network import (
    Phase,
    VirtualMessage,
    VirtualNetwork,
    phases_of,
    phases_of_schedule,
    ring,
)
from shoal.rehearse.virtual_time import Fiber, VirtualTime
from shoal.schedules.collectives.catalog import build, proven_collective
from shoal.schedules.user import is_user_function

GroupKey = tuple[object, ...]
MessageKey = tuple[GroupKey, int, int, int]


class VirtualWork:
    """Ends with `end`; any number of fibers may wait for it."""

    def __init__(self, time: VirtualTime, doing: str):
        self._time = time
        self.doing = doing
        self._waiting: list[Fiber] = []
        self.is_done = False
        self.error: BaseException | None = None
        self.start_ns = round(time.now_s * 1e9)
        self.times: tuple[int, int] | None = None

    def end(self, error: BaseException | None = None) -> None:
        """The first end counts: a peer may have been lost meanwhile."""
        if self.is_done:
            return
        self.is_done = True
        self.error = error
        self.times = (self.start_ns, round(self._time.now_s * 1e9))
        for fiber in self._waiting:
            self._time.wake(fiber)

    def poll(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        while not self.is_done:
            self._waiting.append(self._time.current)
            self._time.park(self.doing)
        if self.error is not None:
            raise self.error


@dataclass
class _Meeting:
    """One collective: the calls that have come, by rank."""

    calls: dict[int, Call] = field(default_factory=dict)
    works: dict[int, VirtualWork] = field(default_factory=dict)


class _GroupState:
    """The collectives of a group, which are carried out one after the other."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks  # of the world
        self.meetings: dict[int, _Meeting] = {}
        self.complete: deque[_Meeting] = deque()
        self.under_way: _Meeting | None = None
        self.gone: list[int] = []  # ranks of the group that were lost, or have left it

    def abandon(self, is_lost: bool) -> None:
        """What needs a rank that is gone fails; where it has left, what it has begun is ended."""
        waiting = list(self.meetings.values())
        if is_lost:
            waiting += [*self.complete, *([self.under_way] if self.under_way else [])]
            self.complete.clear()
        for meeting in waiting:
            for rank, work in meeting.works.items():
                work.end(self.loss(rank, work.doing))

    def loss(self, rank: int, doing: str) -> PeerLost:
        return PeerLost(self.ranks[rank], self.ranks[self.gone[0]], doing)


class VirtualRanks:
    """What the ranks of a world share: groups, mailboxes and the network."""

    def __init__(
        self, network: VirtualNetwork, time: VirtualTime, devices: Sequence[int], algorithm: str
    ):
        """`devices[r]` is where rank r is; `algorithm` is that of an all-reduce, or "auto"."""
        self.network = network
        self.time = time
        self.devices = tuple(devices)
        self.totals: dict[object, int] = {}  # addresses of what is added up before all give it
        self._algorithm = algorithm
        cluster = network.cluster
        inside = cluster.node.devices
        racks = cluster.nodes_per_rack
        self._levels = (inside,) if racks is None else (inside, racks * inside)
        self._groups: dict[GroupKey, _GroupState] = {}
        self._boxes: dict[MessageKey, deque[_Flight]] = defaultdict(deque)
        self._receivers: dict[MessageKey, deque[_Receiver]] = defaultdict(deque)

    def enter(self, key: GroupKey, ranks: tuple[int, ...]) -> None:
        """A rank is there; each of a group calls it."""
        self._groups.setdefault(key, _GroupState(ranks))

    def leave(self, key: GroupKey, rank: int, is_lost: bool = False) -> None:
        """This rank of a group takes part in nothing more; what needs it fails on the others."""
        group = self._groups[key]
        if rank in group.gone:
            return
        group.gone.append(rank)
        group.abandon(is_lost)
        for box in [box for box in self._receivers if box[:2] == (key, rank)]:
            self._deliver(box)

    def lose(self, rank: int, is_lost: bool) -> None:
        """The process of a rank of the world has ended; `is_lost`: not by itself."""
        for key, group in self._groups.items():
            if rank in group.ranks:
                self.leave(key, group.ranks.index(rank), is_lost)

    def meet(self, key: GroupKey, number: int, rank: int, call: Call) -> VirtualWork:
        group = self._groups[key]
        doing = f"{call.kind} #{number} of ranks {_shown(group.ranks)}"
        work = VirtualWork(self.time, doing)
        if group.gone:
            work.end(group.loss(rank, doing))
            return work
        meeting = group.meetings.setdefault(number, _Meeting())
        meeting.calls[rank] = call
        meeting.works[rank] = work
        if len(meeting.calls) == len(group.ranks):
            group.complete.append(group.meetings.pop(number))
            self._begin_next(group)
        return work

    def _begin_next(self, group: _GroupState) -> None:
        if group.under_way is not None or not group.complete:
            return
        meeting = group.under_way = group.complete.popleft()
        ranks = group.ranks
        calls = [meeting.calls[rank] for rank in range(len(ranks))]
        error: Exception | None = _different(calls, ranks)
        if error is None and not self._is_added_up(calls):
            try:
                carry_out(calls)
            except Exception as raised:
                error = raised

        def done() -> None:
            group.under_way = None
            for work in meeting.works.values():
                work.end(error)
            self._begin_next(group)

        phases = [] if error is not None else self._phases(calls, ranks)
        self.network.send_phases(phases, done)

    def _is_added_up(self, calls: Sequence[Call]) -> bool:
        if calls[0].kind != "all_reduce" or not self.totals:
            return False
        found = {call.data.data_ptr() for call in calls if isinstance(call.data, Tensor)}
        return len(found) == 1 and found <= set(self.totals.values())

    def _phases(self, calls: Sequence[Call], ranks: tuple[int, ...]) -> list[Phase]:
        call = calls[calls[0].root]
        places = [self.devices[rank] for rank in ranks]
        places = places[call.root :] + places[: call.root]  # the root is the first
        if call.kind == "all_reduce" and self._algorithm != "auto":
            return self._of_algorithm(places, call)
        num_bytes = max(each.num_bytes for each in calls)
        return phases_of(call.kind, tuple(places), num_bytes, self._levels)

    def _of_algorithm(self, places: Sequence[int], call: Call) -> list[Phase]:
        size = len(places)
        name = self._algorithm
        if name == "ring":
            return [ring(places, call.num_bytes, 2)]
        own = is_user_function(name)
        collective = (
            proven_collective(name, "all_reduce", size) if own else build("all_reduce", name, size)
        )
        return phases_of_schedule(collective, places, call.num_bytes)

    # ------------------------------------------------------------------ messages

    def send(self, key: MessageKey, src: int, dst: int, data: Tensor) -> None:
        """The bytes are on their way; they arrive in the order in which they were sent."""
        if key[1] in self._groups[key[0]].gone:
            return
        flight = _Flight(_copied(data.detach()))
        self._boxes[key].append(flight)

        def arrived() -> None:
            flight.has_arrived = True
            self._deliver(key)

        self.network.send(
            [VirtualMessage(self.devices[src], self.devices[dst], data.nbytes)], arrived
        )

    def receive(self, key: MessageKey, into: Tensor, doing: str) -> VirtualWork:
        work = VirtualWork(self.time, doing)
        self._receivers[key].append(_Receiver(into, work))
        self._deliver(key)
        return work

    def _deliver(self, key: MessageKey) -> None:
        box = self._boxes[key]
        receivers = self._receivers[key]
        while box and receivers and box[0].has_arrived:
            data = box.popleft().data
            receiver = receivers.popleft()
            into = receiver.into
            error = None
            if data.numel() != into.numel() or data.dtype != into.dtype:
                error = ShoalError(
                    f"expected {into.numel()} {into.dtype}, got {data.numel()} {data.dtype} "
                    f"(message {key[1:]})"
                )
            else:
                if into.stride() == (0,):  # one number, as in `_copied`
                    into = into[:1]
                    data = data[:1]
                into.detach().copy_(data.view(into.shape))
            receiver.work.end(error)
        group = self._groups[key[0]]
        while receivers and not box and key[1] in group.gone:
            lost = receivers.popleft().work
            lost.end(group.loss(key[2], lost.doing))


def _copied(data: Tensor) -> Tensor:
    """One number that stands for as many as the message is long stays one."""
    return data[:1].clone().expand(data.shape) if data.stride() == (0,) else data.clone()


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

    may_share = False  # what workers exchange takes its time on the links

    def __init__(self, exchange: VirtualRanks, ranks: Sequence[int], rank: int, key: GroupKey = ()):
        self._exchange = exchange
        self._ranks = tuple(ranks)  # of the world
        self._key = key
        self.rank = rank
        self.size = len(self._ranks)
        self._calls = 0
        self._children: list[Virtual | None] = []
        exchange.enter(key, self._ranks)

    def submit(self, call: Call) -> Work:
        self._calls += 1
        return self._exchange.meet(self._key, self._calls, self.rank, call)

    def send(self, data: Tensor, dst: int, tag: int) -> Work:
        key = (self._key, self.rank, dst, tag)
        self._exchange.send(key, self._ranks[self.rank], self._ranks[dst], data)
        return DoneWork()

    def recv(self, into: Tensor, src: int, tag: int) -> Work:
        key = (self._key, src, self.rank, tag)
        doing = f"a message of rank {self._ranks[src]}"
        return self._exchange.receive(key, into, doing)

    def split(self, ranks: Sequence[int]) -> Virtual | None:
        child = None
        if self.rank in ranks:
            of_world = [self._ranks[rank] for rank in ranks]
            key = (self._key, len(self._children), tuple(ranks))
            child = Virtual(self._exchange, of_world, list(ranks).index(self.rank), key)
        self._children.append(child)
        return child

    def close(self) -> None:
        for child in filter(None, self._children):
            child.close()
        self._exchange.leave(self._key, self.rank)


class VirtualElasticGroup(ElasticGroup):
    """Of an elastic run: formed by the board, as that of real workers."""

    def __init__(self, membership: GroupMembership, ranks: VirtualRanks):
        super().__init__(membership, math.inf)
        self._ranks = ranks

    def _form(self, generation: Generation, exchange: Exchange) -> Executor:
        """One that is lost from here on has left the group, or has not answered."""
        members = generation.members
        if len(members) == 1:
            return Solo()
        rank = members.index(self.membership.me)
        key = ("generation", generation.number, *members)
        executor = Virtual(self._ranks, [member.worker for member in members], rank, key)
        try:
            exchange(b"there")
        except BaseException:
            executor.close()
            raise
        return executor
