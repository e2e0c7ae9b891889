"""The simulated world's time, processes, connections, and coordinator.

Events come in order; processes stop, go on, die and start again; connections are ordered or not,
break, stall and repeat; answers of the coordinator come late or never.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal.server.chain import ChainConfig
from shoal.server.chain.messages import ChainMessage

MAX_EVENTS = 50_000  # a schedule has some hundred


class Loop:
    """A seeded event loop. All randomness of a world comes from `rng`, in the order of events."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, delay_s: float, do: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._count, do, arguments))

    def soon(self, mean_s: float) -> float:
        """A random delay: mostly short, sometimes six times as long."""
        x = self.rng.random()
        return mean_s * (0.1 + x + 5.0 * x**8)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def run(self, until_s: float, is_done: Callable[[], bool] = lambda: False) -> bool:
        """Until the time has come, or it is done: whether it is."""
        events = self._events
        while events and events[0][0] <= until_s:
            self.now_s, _, do, arguments = heapq.heappop(events)
            do(*arguments)
            assert self._count < MAX_EVENTS, "messages without end"
            if is_done():
                return True
        self.now_s = until_s
        return is_done()


class Process:
    """What runs in it waits while it is paused, and is gone when it dies."""

    def __init__(self, loop: Loop):
        self.loop = loop
        self.life = 0
        self.is_up = False
        self.is_paused = False
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def is_running(self) -> bool:
        return self.is_up and not self.is_paused

    def after(self, delay_s: float, do: Callable[..., None], *arguments: Any) -> None:
        """A timer of this life of the process."""
        self.loop.after(delay_s, self.run, self.life, do, arguments)

    def run(self, life: int, do: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if life != self.life or not self.is_up:
            return
        if self.is_paused:
            self._backlog.append((do, arguments))
        else:
            do(*arguments)

    def start(self) -> None:
        self.life += 1
        self.is_up = True

    def die(self) -> None:
        self.life += 1
        self.is_up = self.is_paused = False
        self._backlog = []

    def pause(self) -> None:
        self.is_paused = self.is_up

    def resume(self) -> None:
        """All that has come in the meantime comes now."""
        self.is_paused = False
        backlog, self._backlog = self._backlog, []
        life = self.life
        for do, arguments in backlog:
            self.run(life, do, arguments)


MESSAGE_S = 0.0005  # mean
RECONNECT_S = 0.004
LATE_S = 0.040  # of messages that outlive their connection


@dataclass
class Link:
    """One pair of replicas. What is under way belongs to a `connection`, and is lost with it."""

    connection: int = 0
    is_up: bool = False
    last_s: dict[int, float] = field(default_factory=dict)  # the latest arrival at each end
    stalled_until_s: dict[int, float] = field(default_factory=dict)  # a cut towards this end
    cut_until_s: float = 0.0  # no connection can be made
    down: set[int] = field(default_factory=set)  # nothing can be sent to these ends
    lives: dict[int, int] = field(default_factory=dict)  # of the connection towards each end


class Network:
    """`is_ordered`: as TCP; otherwise in any order, twice, and some long after they were sent."""

    def __init__(self, loop: Loop, is_ordered: bool):
        self.loop = loop
        self.is_ordered = is_ordered
        self.deliver: Callable[[int, int, ChainMessage], None]
        self.tell: Callable[[int, int, bool], None]  # an end that its connection is up, or lost
        self.may_connect: Callable[[int, int], bool]
        self._links: dict[tuple[int, int], Link] = {}

    def link(self, a: int, b: int) -> Link:
        pair = (a, b) if a < b else (b, a)
        if pair not in self._links:
            self._links[pair] = Link()
        return self._links[pair]

    def send(self, sender: int, to: int, message: ChainMessage) -> None:
        link = self.link(sender, to)
        if not link.is_up or to in link.down:
            return
        self._carry(link, sender, to, message)
        if not self.is_ordered and self.loop.chance(0.1):
            self._carry(link, sender, to, message)

    def _carry(self, link: Link, sender: int, to: int, message: ChainMessage) -> None:
        loop = self.loop
        mean_s = MESSAGE_S if self.is_ordered else 3 * MESSAGE_S
        if not self.is_ordered and loop.chance(0.03):
            loop.after(loop.soon(LATE_S), self.deliver, sender, to, message)
            return
        arrival_s = max(loop.now_s + loop.soon(mean_s), link.stalled_until_s.get(to, 0.0))
        if self.is_ordered:
            arrival_s = link.last_s[to] = max(arrival_s, link.last_s.get(to, 0.0))
        life = self.life(link, to)
        loop.after(arrival_s - loop.now_s, self._arrive, link, life, sender, to, message)

    def life(self, link: Link, to: int) -> tuple[int, int]:
        """Of the connection towards this end; what is under way is lost with it."""
        return link.connection, link.lives.get(to, 0)

    def _arrive(
        self, link: Link, life: tuple[int, int], sender: int, to: int, message: ChainMessage
    ) -> None:
        if self.life(link, to) == life:
            self.deliver(sender, to, message)

    def connect(self, a: int, b: int) -> None:
        link = self.link(a, b)
        if link.is_up or not self.may_connect(a, b):
            return
        if self.loop.now_s < link.cut_until_s:
            self.loop.after(self.loop.soon(RECONNECT_S), self.connect, a, b)
            return
        link.connection += 1
        link.is_up = True
        link.down.clear()
        link.last_s.clear()
        for end, other in ((a, b), (b, a)):
            self.loop.after(self.loop.soon(MESSAGE_S), self._tell, link.connection, end, other)

    def _tell(self, connection: int, end: int, other: int) -> None:
        if self.link(end, other).connection == connection:
            self.tell(end, other, self.link(end, other).is_up)

    def break_link(self, a: int, b: int, loses_messages: bool = True) -> None:
        """What is under way may still arrive, as from a process that has died."""
        link = self.link(a, b)
        if not link.is_up:
            return
        link.is_up = False
        link.connection += loses_messages
        for end, other in ((a, b), (b, a)):
            self.loop.after(self.loop.soon(MESSAGE_S), self._tell, link.connection, end, other)
        self.loop.after(self.loop.soon(RECONNECT_S), self.connect, a, b)

    def break_one_way(self, sender: int, to: int) -> None:
        """Each replica connects by itself: the one that sends notices it, and connects again."""
        link = self.link(sender, to)
        if not link.is_up or to in link.down:
            return
        link.down.add(to)
        link.lives[to] = link.lives.get(to, 0) + 1
        life = self.life(link, to)
        self.loop.after(self.loop.soon(MESSAGE_S), self._lose_one_way, link, life, sender, to)

    def _lose_one_way(self, link: Link, life: tuple[int, int], sender: int, to: int) -> None:
        if self.life(link, to) == life and link.is_up:
            self.tell(sender, to, False)
            delay_s = self.loop.soon(RECONNECT_S)
            self.loop.after(delay_s, self._restore_one_way, link, life, sender, to)

    def _restore_one_way(self, link: Link, life: tuple[int, int], sender: int, to: int) -> None:
        if self.life(link, to) == life and link.is_up:
            link.down.discard(to)
            self.tell(sender, to, True)

    def stall(self, to: int, other: int, seconds: float) -> None:
        """A cut in one direction: nothing arrives before it ends."""
        self.link(to, other).stalled_until_s[to] = self.loop.now_s + seconds

    def cut(self, a: int, b: int, seconds: float) -> None:
        """The connection ends, and none can be made for so long."""
        self.link(a, b).cut_until_s = self.loop.now_s + seconds
        self.break_link(a, b)

    def heal(self) -> None:
        for link in self._links.values():
            link.cut_until_s = 0.0


TTL_S = 0.040
ANSWER_S = 0.001  # mean, each way
PATIENCE_S = 0.015  # of those who ask


class View(NamedTuple):
    config: ChainConfig | None
    version: int
    alive: dict[int, int]
    unreachable: dict[int, tuple[int, ...]]


class Register:
    """The store. Its clock is the world's."""

    def __init__(self, loop: Loop):
        self.loop = loop
        self.config: ChainConfig | None = None
        self.version = 0
        self.heads: set[int | None] = set()
        self._leases: dict[int, tuple[int, float]] = {}  # replica: incarnation, end
        self._unreachable: dict[int, tuple[int, ...]] = {}  # what each says of others

    def view(self) -> View:
        now_s = self.loop.now_s
        alive = {r: inc for r, (inc, end_s) in self._leases.items() if end_s > now_s}
        return View(self.config, self.version, alive, dict(self._unreachable))

    def grant(self, replica: int, incarnation: int, unreachable: tuple[int, ...]) -> float:
        if incarnation >= self._leases.get(replica, (0, 0.0))[0]:  # not from an earlier life
            self._leases[replica] = (incarnation, self.loop.now_s + TTL_S)
            self._unreachable[replica] = unreachable
        return TTL_S

    def keep_alive(
        self, replica: int, incarnation: int, unreachable: tuple[int, ...]
    ) -> float | None:
        """None if the lease has ended."""
        if self.view().alive.get(replica) != incarnation:
            return None
        return self.grant(replica, incarnation, unreachable)

    def swap(self, config: ChainConfig, version: int) -> int | None:
        """The new version; None if there is another one than `version`."""
        if version != self.version:
            return None
        assert config.epoch == (self.config.epoch if self.config else 0) + 1
        self.version += 1
        self.config = config
        self.heads.add(config.head)
        return self.version


class Requests:
    """How replicas reach a store: late, not at all, or without learning the answer."""

    def __init__(self, loop: Loop, store: Any, loss: float):
        self.loop = loop
        self.store = store
        self.loss = loss
        self.is_up = True
        self.slow = loop.rng.choice((0.02, 0.02, 0.3))  # the share of late messages
        self.cut: set[Process] = set()  # reach it no more

    def call(
        self,
        process: Process,
        request: Callable[[], Any],
        answered: Callable[[Any], None],
        unanswered: Callable[[], None],
    ) -> None:
        """One of the two is called, unless the process dies."""
        call = _Call(process, process.life, answered)
        self.loop.after(self._delay(), self._execute, call, request)
        process.after(PATIENCE_S, call.give_up, unanswered)

    def _execute(self, call: _Call, request: Callable[[], Any]) -> None:
        if not self._gets_through(call.process):
            return
        answer = request()
        if self._gets_through(call.process):
            self.loop.after(self._delay(), call.process.run, call.life, call.answer, (answer,))

    def _gets_through(self, process: Process) -> bool:
        return self.is_up and process not in self.cut and not self.loop.chance(self.loss)

    def _delay(self) -> float:
        """Sometimes longer than the patience of those who ask."""
        return self.loop.soon(ANSWER_S) * (15 if self.loop.chance(self.slow) else 1)


class _Call:
    def __init__(self, process: Process, life: int, answered: Callable[[Any], None]):
        self.process = process
        self.life = life
        self._answered: Callable[[Any], None] | None = answered

    def answer(self, answer: Any) -> None:
        if self._answered is not None:
            answered, self._answered = self._answered, None
            answered(answer)

    def give_up(self, unanswered: Callable[[], None]) -> None:
        if self._answered is not None:
            self._answered = None
            unanswered()
