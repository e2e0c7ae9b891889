"""What a copy of a chain knows: its place, its log, how far it is committed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from shoal.server.chain.config import NO_CONFIG, ChainConfig, Entry
from shoal.server.chain.entries import EntryLog
from shoal.server.chain.messages import (
    Acked,
    Append,
    Apply,
    At,
    Disconnect,
    Effect,
    Send,
    Teach,
    TooOld,
)
from shoal.server.chain.teaching import Teaching
from shoal.strategy.sync_terms.ps import MAX_LAG

ChainConsistency = Literal["strong", "eventual"]


class Fenced(Exception):
    """This copy is no member of the chain."""


class NotHead(Exception):
    """Operations go to the head of the chain."""


class Rounds:
    """Questions to all other members, each with those that have not confirmed it."""

    def __init__(self) -> None:
        self._last = 0
        self._waits_for: dict[int, set[int]] = {}

    def open(self, members: Iterable[int]) -> int:
        self._last += 1
        self._keep_open({**self._waits_for, self._last: set(members)})
        return self._last

    def restart(self, members: list[int]) -> None:
        """A new epoch: each open round is about its members."""
        self._keep_open({number: set(members) for number in self._waits_for})

    def confirm(self, number: int, member: int) -> None:
        self.missing(number).discard(member)
        self._keep_open(self._waits_for)

    def _keep_open(self, rounds: dict[int, set[int]]) -> None:
        self._waits_for = {number: missing for number, missing in rounds.items() if missing}

    def open_for(self, member: int) -> list[int]:
        return [number for number, missing in self._waits_for.items() if member in missing]

    def missing(self, number: int) -> set[int]:
        """Who has not confirmed it."""
        return self._waits_for.get(number, set())


class ChainState:
    """Place, log and commitment of one copy; `ChainNode` says when they change."""

    def __init__(self, me: int, incarnation: int, consistency: ChainConsistency):
        self.me = me
        self.incarnation = incarnation
        self.consistency = consistency
        self.config = NO_CONFIG
        self.committed = 0
        self.is_fenced = False  # was a member and is none any more
        self.weigh: Callable[[Any], int] = lambda op: 1  # what keeping an operation takes up
        self.max_weight = 4096  # of what is kept for learners; then they need another snapshot
        self._log = EntryLog()
        self._teaching = Teaching()
        self._rounds = Rounds()
        self._successor_is_known = False  # it has said in this epoch where it is

    @property
    def config(self) -> ChainConfig:
        return self._config

    @config.setter
    def config(self, config: ChainConfig) -> None:
        """Its place is looked up with every message."""
        me = self.me
        self.is_member = config.has(me, self.incarnation)
        self.is_head = self.is_member and config.head == me
        self.is_tail = self.is_member and config.tail == me
        self.predecessor = config.predecessor(me) if self.is_member else None
        self.successor = config.successor(me) if self.is_member else None
        self._config = config
        self.epoch = config.epoch

    @property
    def position(self) -> int:
        """The last entry of the log."""
        return self._log.end

    @property
    def asked(self) -> ChainConfig | None:
        """What a tail has asked for, with one more member, while it does not know the answer."""
        return self._teaching.asked

    @property
    def has_room(self) -> bool:
        """Whether an eventual head may take another operation."""
        return self.consistency == "strong" or self.position - self.committed < MAX_LAG

    @property
    def takes_snapshot(self) -> bool:
        """A learner that has no state yet."""
        return self.position == 0 and not self.is_member and not self.is_fenced

    @property
    def others(self) -> list[int]:
        """The other members, while it is one."""
        return [m for m in self.config.members if m != self.me] if self.is_member else []

    def _check_member(self) -> None:
        if not self.is_member:
            raise Fenced(f"replica {self.me} is no member of the chain in epoch {self.epoch}")

    # ------------------------------------------------------------------ log and commitment

    def _append(self, op: Any) -> list[Effect]:
        entry = Entry(self._log.end + 1, op)
        self._log.append(entry, self.weigh(op))
        effects = self._forward((entry,)) if self._successor_is_known else []
        effects.append(Apply(entry))
        return effects + self._commit_alone() if self.is_tail else effects

    def _commit_alone(self) -> list[Effect]:
        """A tail commits what it has, unless it is adding a member."""
        if self.is_tail and self._teaching.adding is None:
            return self._commit(self.position)
        return []

    def _commit(self, upto: int) -> list[Effect]:
        """Every member has all up to `upto`."""
        before = self.committed
        upto = min(upto, self._log.end)
        if upto <= before:
            return []
        self.committed = upto
        effects: list[Effect] = []
        if self.predecessor is not None:
            effects.append(Send(self.predecessor, Acked(self.epoch, upto)))
        if not self._teaching.has_learners:
            self._log.drop(upto)
            return effects
        entries = self._log.between(before, upto)
        for learner in self._teaching.listeners():
            effects += self._teach(learner, entries)
        return effects + self._give_up_slow()

    def _give_up_slow(self) -> list[Effect]:
        """The log is no longer kept for learners that are too far behind: they begin again."""
        effects: list[Effect] = []
        self._forget()
        while (
            self._log.weight > self.max_weight and (slowest := self._teaching.slowest) is not None
        ):
            incarnation = self._teaching.incarnation_of(slowest) or 0
            self._teaching.drop(slowest)
            effects += [Send(slowest, TooOld(self.epoch, incarnation)), Disconnect(slowest)]
            self._forget()
        return effects

    def _forget(self) -> None:
        self._log.drop(self._teaching.needed_after(self.committed))

    # ------------------------------------------------------------------ to a neighbour

    def _at(self, predecessor: int) -> list[Effect]:
        return [Send(predecessor, At(self.epoch, self.position, self.committed))]

    def _forward(self, entries: tuple[Entry, ...]) -> list[Effect]:
        assert self.successor is not None
        return [
            Send(self.successor, Append(self.epoch, entry.position, self.committed, entry.op))
            for entry in entries
        ]

    def _teach(self, learner: int, entries: tuple[Entry, ...]) -> list[Effect]:
        return [Send(learner, Teach(self.epoch, entry.position, entry.op)) for entry in entries]
