"""Connections between replicas: ordered or not, that break and come back, stall, and repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.server.chain.messages import ChainMessage
from tests.server.chain.loop import Loop

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
