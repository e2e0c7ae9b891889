"""A server process of the simulated world: the production node and manager, an application."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.server.chain import Entry, take
from shoal.server.chain.manager import ChainManager, Fetch
from shoal.server.chain.messages import (
    WHILE_APPLYING,
    ChainMessage,
    ChangeConfig,
    Disconnect,
    Effect,
    Refetch,
    Reset,
    Send,
    SendSnapshot,
)
from shoal.server.chain.node import ChainNode, Fenced
from tests.server.chain.counters import Counters, Push, Resume
from tests.server.chain.network import MESSAGE_S, TTL_S, Process

if TYPE_CHECKING:
    from tests.server.chain.world import World

TICK_S = TTL_S / 4
APART_S = TTL_S
SNAPSHOT_S = 8 * MESSAGE_S
APPLY_S = MESSAGE_S
Answer = Callable[[Any], None]


@dataclass(eq=False)
class PendingRead:
    """What a thread of a server does for one pull."""

    key: int
    answer: Answer
    after: int  # logged when it arrived: it is read when that is applied
    value: int | None = None
    upto: int = 0  # logged when it was read
    is_checked: bool = False  # its thread goes on
    round: int | None = None


class Replica:
    """What production does with threads and sockets is done by events; the rest is its code."""

    node_type = ChainNode
    manager_type = ChainManager
    state_type = Counters

    def __init__(self, world: World, me: int):
        self.world = world
        self.me = me
        self.process = Process(world.loop)
        self.incarnation = 0
        self.rate = 1.0 + 0.04 * (2 * world.loop.rng.random() - 1)  # of its clock

    @property
    def clock_s(self) -> float:
        return self.world.loop.now_s * self.rate

    def start(self) -> None:
        self.process.start()
        self.down_since_s = dict.fromkeys(range(self.world.replica_count), self.clock_s)
        self.reset()
        self.tick()

    def reset(self) -> None:
        """Begin with nothing, as another incarnation."""
        self.incarnation += 1
        world = self.world
        self.node = self.node_type(
            self.me, self.incarnation, world.consistency, world.replica_count
        )
        self.node.max_weight = world.max_weight
        self.manager = self.manager_type(self.node, world.founders)
        self.state = self.state_type()
        self.unapplied: deque[Entry] = deque()
        self.applied = 0
        self.has_lease = False
        self.is_asking = False
        self.waiting: dict[int, Answer] = {}
        self.reads: list[PendingRead] = []
        self.acks: list[tuple[int, Answer]] = []  # for what is applied and not committed
        self.uncommitted: deque[tuple[Entry, bool]] = deque()  # applied; whether it counted

    # ------------------------------------------------------------------ the coordinator

    def tick(self) -> None:
        self.process.after(TICK_S, self.tick)
        self.keep_lease()
        self.manager.look()
        self.pump()
        self.ask_again()

    def ask_again(self) -> None:
        for read in list(self.reads):
            if read.round is not None and read in self.reads:
                self.do(self.node.ask_again(read.round))

    def keep_lease(self) -> None:
        asked_s = self.clock_s
        store = self.world.coordinator.store
        me, incarnation, lease = self.me, self.incarnation, self.manager.lease
        unreachable = self.unreachable()
        self.has_lease &= lease.is_held

        def granted(ttl_s: float) -> None:
            if incarnation == self.incarnation:
                self.has_lease = True
                lease.granted(asked_s, ttl_s)
                self.pump()

        def renewed(left_s: float | None) -> None:
            if incarnation != self.incarnation:
                return
            if left_s is None:
                self.has_lease = False
                lease.lost()
            else:
                lease.renewed(asked_s, left_s)

        request = store.keep_alive if self.has_lease else store.grant
        answered = renewed if self.has_lease else granted
        self.world.coordinator.call(
            self.process, lambda: request(me, incarnation, unreachable), answered, lambda: None
        )

    def pump(self) -> None:
        """Carry out what the manager wants, one request at a time."""
        request = None if self.is_asking else self.manager.next_request(self.clock_s)
        if request is None:
            return
        self.is_asking = True
        store = self.world.coordinator.store
        incarnation = self.incarnation

        def ask() -> Any:
            if isinstance(request, Fetch):
                return store.view()
            return store.swap(request.config, request.version)

        def answered(answer: Any) -> None:
            if incarnation == self.incarnation:
                self.is_asking = False
                self.settle()
                if isinstance(request, Fetch):
                    self.do(self.manager.fetched(request, *answer))
                elif answer is not None:
                    self.do(self.manager.know(request.config, answer))
                else:
                    self.manager.look()
                    self.do([])
                self.pump()

        def unanswered() -> None:
            if incarnation == self.incarnation:
                self.is_asking = False

        self.world.coordinator.call(self.process, ask, answered, unanswered)

    def look(self) -> None:
        """A watch has seen a change."""
        self.manager.look()
        self.pump()

    # ------------------------------------------------------------------ the chain

    def receive(self, sender: int, message: ChainMessage) -> None:
        if not isinstance(message, WHILE_APPLYING):
            self.settle()
        self.do(self.node.receive(sender, message))

    def unreachable(self) -> tuple[int, ...]:
        limit_s = self.clock_s - APART_S
        return tuple(peer for peer, since_s in self.down_since_s.items() if since_s < limit_s)

    def link_changed(self, peer: int, is_up: bool) -> None:
        if is_up:
            self.down_since_s.pop(peer, None)
        else:
            self.down_since_s.setdefault(peer, self.clock_s)
        self.settle()
        self.do(self.node.link_up(peer) if is_up else self.node.link_lost(peer))

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.world.network.send(self.me, effect.to, effect.message)
            elif isinstance(effect, Entry):
                self.unapplied.append(effect)
                delay_s = self.world.loop.soon(APPLY_S)
                self.process.after(delay_s, self.apply_upto, self.incarnation, effect)
            elif isinstance(effect, Reset):
                self.start_again()
                return
            elif isinstance(effect, SendSnapshot):
                assert self.applied == effect.position
                self.world.send_snapshot(self.me, effect, self.state.copy())
            elif isinstance(effect, Refetch | ChangeConfig):
                self.look()
            elif isinstance(effect, Disconnect):
                self.world.given_up += 1
                self.world.network.break_link(self.me, effect.to)
        self.note_committed()
        self.advance_waiting()

    def note_committed(self) -> None:
        while self.uncommitted and self.uncommitted[0][0].position <= self.node.committed:
            self.world.committed(self, *self.uncommitted.popleft())

    def start_again(self) -> None:
        for answer in [*self.waiting.values(), *(a for _, a in self.acks)]:
            answer(None)
        for read in self.reads:
            read.answer(None)
        self.reset()
        self.keep_lease()
        self.pump()

    def install(self, incarnation: int, position: int, state: Counters) -> None:
        if incarnation == self.incarnation and self.node.takes_snapshot:
            self.state = state
            self.applied = position
            self.do(self.node.install(position))

    def settle(self) -> None:
        """Apply all that is logged."""
        while (entry := take(self.unapplied)) is not None:
            self.apply(entry)

    def apply_upto(self, incarnation: int, last: Entry) -> None:
        """What a thread does that has logged an operation."""
        while incarnation == self.incarnation:
            entry = take(self.unapplied, last.position)
            if entry is None:
                return
            self.apply(entry)
            self.note_committed()
            self.advance_waiting()

    def apply(self, entry: Entry) -> None:
        is_counted = self.state.apply(entry.op)
        self.applied = entry.position
        self.uncommitted.append((entry, is_counted))
        answer = self.waiting.pop(entry.position, None)
        if answer is not None:
            self.acknowledge(entry.position, answer, is_counted)

    # ------------------------------------------------------------------ clients

    def push(self, op: Push | Resume, answer: Answer) -> None:
        """The answer: True, or the head to turn to (None if there is none, or not known)."""
        try:
            if not self.node.has_room:
                answer(self.node.config.head)
                return
            position, effects = self.node.propose(op)
        except Fenced:
            answer(self.node.config.head)
        else:
            self.waiting[position] = answer
            self.do(effects)

    def acknowledge(self, position: int, answer: Answer, is_counted: bool) -> None:
        is_eventual = self.node.consistency == "eventual"
        if is_eventual and not is_counted:
            answer("resume")
        elif is_eventual and self.is_leased:
            self.world.acknowledged(self)
            answer(True)
        else:
            self.acks.append((position, answer))

    @property
    def is_leased(self) -> bool:
        return self.node.is_member and self.manager.lease.is_valid(self.node.epoch, self.clock_s)

    def read(self, key: int, answer: Answer) -> None:
        """The answer: the value as a tuple of one, or the head to turn to."""
        if not self.node.is_member:
            answer(self.node.config.head)
            return
        self.reads.append(PendingRead(key, answer, self.node.position))
        self.advance_waiting()

    def advance_waiting(self) -> None:
        for read in list(self.reads):
            if read not in self.reads:
                continue
            if read.value is None:
                if self.applied < read.after:
                    continue
                read.value = self.state.sums[read.key]
                read.upto = self.node.position
                # a thread may be stopped between the two
                self.process.after(self.world.loop.soon(MESSAGE_S / 4), self.check, read)
            elif read.is_checked and read.round is None and self.may_show(read):
                self.confirm(read)
            elif read.round is not None and self.node.is_confirmed(read.round):
                self.finish(read)
        for position, answer in list(self.acks):
            if self.node.committed >= position:
                self.acks.remove((position, answer))
                self.world.acknowledged(self)
                answer(True)

    def may_show(self, read: PendingRead) -> bool:
        """Whether all that it has seen is committed."""
        return self.node.consistency == "eventual" or self.node.committed >= read.upto

    def check(self, read: PendingRead) -> None:
        if read in self.reads:
            read.is_checked = True
            self.advance_waiting()

    def confirm(self, read: PendingRead) -> None:
        if self.is_leased:
            self.finish(read)
        else:
            read.round, effects = self.node.ask()
            self.do(effects)

    def finish(self, read: PendingRead) -> None:
        self.reads.remove(read)
        read.answer((read.value,))
