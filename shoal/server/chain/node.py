"""One copy of a chain: what it does when something arrives. Van Renesse & Schneider, 2004.

              Append ->        Append ->
    client -> head            middle            tail         an operation goes down the chain,
              <- Acked         <- Acked                      its acknowledgement comes up

An operation is committed when the tail has it, for then every member has it. A copy applies
an operation when it gets it, after passing it on: so all apply it at the same time. What a member
has applied and not committed is never taken back while it is a member; one that is removed gives up
its state. Outside the chain nothing may follow from it: clients hear of an operation, and of a
state that they read, when all of it is committed (`consistency="eventual"`: at once). What keeps
each log a prefix of one history, whatever is lost, late or twice:

- A member's log contains its successor's, in the same positions: entries come from the predecessor
  alone, in order, without a gap, and are never taken back.
- Each message has its sender's epoch. Lower ones are refused (`Stale`), higher ones are dropped and
  make the node ask for the configuration (`Refetch`).
- In a new epoch both neighbours speak first (`Greet`, `At`): the later of the two is understood,
  and the predecessor sends what the other lacks. A committed entry is held by every member, so this
  is never more than what is not committed.
- Only a tail adds a member, behind itself. It first stops committing, then waits until the learner
  has all that is committed, and only then asks for it; it commits nothing until it knows a later
  epoch. So there is never a committed entry that a member lacks.

What the tail knows of the learners that it brings up to date.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from shoal.server.chain import NO_CONFIG, ChainConfig, Entry, EntryLog
from shoal.server.chain.messages import (
    Acked,
    Append,
    Ask,
    At,
    ChainMessage,
    ChangeConfig,
    Confirm,
    Disconnect,
    Effect,
    Greet,
    Learn,
    Refetch,
    Reset,
    Send,
    SendSnapshot,
    Stale,
    Taught,
    Teach,
    TooOld,
)
from shoal.strategy.ps_term import MAX_LAG

NEAR = 64  # operations: a learner that lacks no more is added


@dataclass
class LearnerSession:
    """One learner. It has all up to `position` once it `has_state`; before, its snapshot will."""

    incarnation: int
    position: int
    has_state: bool


class Teaching:
    """The learners of a tail, and the one that is being added.

    near      ->  adding   the tail commits nothing alone: entries wait in its log
    has all   ->  asked    the compare-and-set is under way; its outcome may stay unknown, so that
                           only a later epoch ends this (`end_epoch`)
    """

    def __init__(self) -> None:
        self.adding: int | None = None
        self.asked: ChainConfig | None = None
        self.sessions: dict[int, LearnerSession] = {}

    def begin(self, peer: int, session: LearnerSession) -> None:
        if self.incarnation_of(peer) != session.incarnation:
            self.drop(peer)
        self.sessions[peer] = session

    def incarnation_of(self, peer: int) -> int | None:
        return self.sessions[peer].incarnation if peer in self.sessions else None

    def taught(self, peer: int, incarnation: int, position: int) -> int:
        """It says that it has all up to `position`; it may have said more before."""
        if self.incarnation_of(peer) != incarnation or not self.sessions[peer].has_state:
            return position
        session = self.sessions[peer]
        session.position = max(session.position, position)
        return session.position

    def listeners(self) -> list[int]:
        """Learners that get each entry when it is committed."""
        return [peer for peer, session in self.sessions.items() if session.has_state]

    @property
    def slowest(self) -> int | None:
        """The learner that is furthest behind, but for the one that is being added."""
        waiting = {p: s.position for p, s in self.sessions.items() if p != self.adding}
        return min(waiting, key=waiting.__getitem__, default=None)

    def needed_after(self, committed: int) -> int:
        """Entries up to here are needed by no learner, nor by the chain."""
        return min([committed, *(s.position for s in self.sessions.values())])

    def advance(self, config: ChainConfig, committed: int, replicas: int) -> ChainConfig | None:
        """The configuration to ask for, when the learner that is being added has everything."""
        if self.asked:
            return None
        if self.adding is None and len(config.members) < replicas:
            near = [p for p in self.listeners() if self.sessions[p].position >= committed - NEAR]
            self.adding = next((peer for peer in near if peer not in config.members), None)
        if self.adding is None or self.sessions[self.adding].position < committed:
            return None
        self.asked = config.plus(self.adding, self.sessions[self.adding].incarnation)
        return self.asked

    def drop(self, peer: int) -> None:
        """The learner is gone. Once it is asked for, the answer must be found out first."""
        if self.asked and peer == self.adding:
            return
        self.sessions.pop(peer, None)
        if peer == self.adding:
            self.adding = None

    def end_epoch(self, is_tail: bool) -> None:
        self.adding = None
        self.asked = None
        if not is_tail:
            self.sessions.clear()


ChainConsistency = Literal["strong", "eventual"]


class Fenced(Exception):
    """This copy is no member of the chain, or not the head, to which operations go."""


@dataclass(eq=False)
class ChainNode:
    """A copy's part in the protocol. Methods return effects, to be carried out in order.

    It begins without configuration and state; `reconfigure` gives it the coordinator's. One that is
    in no configuration is a learner: it asks the tail for what it lacks, and the tail adds it.
    `replicas`: up to how many members a tail adds learners.
    """

    me: int
    incarnation: int = 0
    consistency: ChainConsistency = "strong"
    replicas: int = 1

    def __post_init__(self) -> None:
        self.config = NO_CONFIG
        self.committed = 0
        self.is_fenced = False  # was a member and is none any more
        self.weigh: Callable[[Any], int] = lambda op: 1  # what keeping an operation takes up
        self.max_weight = 4096  # of what is kept for learners; then they need another snapshot
        self._log = EntryLog()
        self._teaching = Teaching()
        self._last_round = 0
        self._rounds: dict[int, set[int]] = {}  # open questions: who has not confirmed each
        self._successor_is_known = False  # it has said in this epoch where it is
        self._early: dict[int, Any] = {}  # by position
        self._ahead: set[int] = set()  # have sent messages of a later epoch, which were dropped

    def propose(self, op: Any) -> tuple[int, list[Effect]]:
        """At the head, while it `has_room`: the operation's position, which is to be committed."""
        if not self.is_head:
            raise Fenced(f"member {self.config.head} is the head in epoch {self.epoch}")
        effects = self._append(op)
        return self.position, effects

    def receive(self, sender: int, message: ChainMessage) -> list[Effect]:
        epoch = self.epoch
        if message.epoch > epoch:
            self._ahead.add(sender)
            return [Refetch()]
        if isinstance(message, Stale):
            return []
        if message.epoch < epoch:
            return [Send(sender, Stale(epoch))]
        if isinstance(message, (Ask, Confirm)):
            return self._from_member(sender, message)
        if sender == self.predecessor:
            if isinstance(message, Append):
                return self._append_in_order(message) + self._commit(message.committed)
            return self._at(sender) if isinstance(message, Greet) else []
        if sender == self.successor:
            return self._from_successor(message)
        if self.is_tail and isinstance(message, Learn):
            return self._teach_after(sender, message)
        if self.is_tail and isinstance(message, Taught):
            self._teaching.taught(sender, message.incarnation, message.position)
            return self._add_learner()
        if sender == self.config.tail and not self.is_member:
            return self._from_teacher(sender, message)
        return []

    def reconfigure(self, config: ChainConfig) -> list[Effect]:
        """The coordinator has this configuration; ignored unless it is later than the known one."""
        if config.epoch <= self.epoch:
            return []
        was_member = self.is_member
        self.config = config
        self._successor_is_known = False
        self._early.clear()
        self._teaching.end_epoch(self.is_tail)
        if was_member and not self.is_member:
            self.is_fenced = True
            return [Reset()]
        self._rounds = {number: set(self.others) for number in self._rounds if self.others}
        effects = self._commit_alone()
        for peer in sorted({*config.members, *self._ahead}):
            effects += self._speak_to(peer)
        return effects

    def link_up(self, peer: int) -> list[Effect]:
        """There is a new connection; what was sent over the previous one may be lost."""
        return self.link_lost(peer) + self._speak_to(peer)

    def link_lost(self, peer: int) -> list[Effect]:
        if peer == self.successor:
            self._successor_is_known = False
        self._teaching.drop(peer)
        self._forget()
        return self._commit_alone()

    def install(self, position: int) -> list[Effect]:
        """A learner that `takes_snapshot` has got the state in which `position` is applied."""
        assert self.takes_snapshot, f"member {self.me} has a state, up to {self.position}"
        self._log = EntryLog(position)
        self.committed = position
        return [] if self.config.tail is None else self._speak_to(self.config.tail)

    def ask(self) -> tuple[int, list[Effect]]:
        """Ask the others whether this epoch goes on: if `is_confirmed`, a read was not old."""
        self._check_member()
        self._last_round += 1
        if missing := {*self.others, *([self.me] if self.asked else ())}:
            self._rounds[self._last_round] = missing
        return self._last_round, self.ask_again(self._last_round)

    def ask_again(self, number: int) -> list[Effect]:
        """An answer was lost with its connection, which only the one who answered has noticed."""
        missing = self._rounds.get(number, ())
        return [Send(peer, Ask(self.epoch, number)) for peer in self.others if peer in missing]

    def is_confirmed(self, number: int) -> bool:
        self._check_member()
        return number not in self._rounds

    # ------------------------------------------------------------------ members

    def _speak_to(self, peer: int) -> list[Effect]:
        """What is said first in an epoch, and over a new connection."""
        effects: list[Effect] = [
            Send(peer, Ask(self.epoch, number))
            for number, missing in self._rounds.items()
            if peer in missing
        ]
        if peer == self.predecessor:
            return effects + self._at(peer)
        if peer == self.successor or (self.is_tail and peer not in self.config.members):
            return [*effects, Send(peer, Greet(self.epoch))]
        if peer == self.config.tail and not self.is_member and not self.is_fenced:
            return [Send(peer, Learn(self.epoch, self.incarnation, self.position))]
        return effects

    def _append_in_order(self, message: Append | Teach) -> list[Effect]:
        """What comes too early waits; what is known is ignored. Over TCP nothing comes early."""
        if message.position > self._log.end:
            self._early[message.position] = message.op
        effects: list[Effect] = []
        while self._early and (following := self._log.end + 1) in self._early:
            effects += self._append(self._early.pop(following))
        return effects

    def _from_successor(self, message: ChainMessage) -> list[Effect]:
        if isinstance(message, Acked):
            return self._commit(message.position)
        if not isinstance(message, At):
            return []
        self._successor_is_known = True
        effects = self._commit(message.committed)
        after = max(message.position, self.committed)  # a message that comes late may say less
        return effects + self._forward(self._log.between(after, self.position))

    def _from_member(self, sender: int, message: Ask | Confirm) -> list[Effect]:
        if isinstance(message, Confirm):
            missing = self._rounds.get(message.number, set())
            missing.discard(sender)
            if not missing:
                self._rounds.pop(message.number, None)
            return []
        if sender in self.others and not self.asked:
            return [Send(sender, Confirm(self.epoch, message.number))]
        return []

    # ------------------------------------------------------------------ the tail and its learners

    def _teach_after(self, learner: int, message: Learn) -> list[Effect]:
        incarnation = message.incarnation
        if (self._teaching.incarnation_of(learner) or 0) > incarnation:
            return []
        position = self._teaching.taught(learner, incarnation, message.position)
        if not self._log.base <= position <= self.position:
            return self._teach_from_snapshot(learner, message)
        self._teaching.begin(learner, LearnerSession(incarnation, position, True))
        missing = self._log.between(position, self.committed)
        return self._teach(learner, missing) + self._add_learner() + self._commit_alone()

    def _teach_from_snapshot(self, learner: int, message: Learn) -> list[Effect]:
        """It lacks entries that are gone."""
        incarnation = message.incarnation
        if message.position:
            return [Send(learner, TooOld(self.epoch, incarnation))]
        if self._teaching.incarnation_of(learner) == incarnation:
            return []  # its snapshot is on the way
        self._teaching.begin(learner, LearnerSession(incarnation, self.position, False))
        return [SendSnapshot(learner, incarnation, self.position), *self._commit_alone()]

    def _add_learner(self) -> list[Effect]:
        asked = self._teaching.advance(self.config, self.committed, self.replicas)
        self._forget()
        return [ChangeConfig(asked)] if asked else []

    def _from_teacher(self, teacher: int, message: ChainMessage) -> list[Effect]:
        """At a learner."""
        if isinstance(message, Greet):
            return self._speak_to(teacher)
        if isinstance(message, TooOld) and message.incarnation == self.incarnation:
            return [Reset()]
        if not isinstance(message, Teach):
            return []
        effects = self._append_in_order(message) + self._commit(self.position)
        return [*effects, Send(teacher, Taught(self.epoch, self.incarnation, self.position))]

    # ------------------------------------------------------------------ its place

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
        place = config.members.index(me) if self.is_member else 0
        self.predecessor = config.members[place - 1] if place else None
        self.successor = config.members[place + 1] if self.is_member and not self.is_tail else None
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
            raise Fenced(f"copy {self.me} is no member of the chain in epoch {self.epoch}")

    # ------------------------------------------------------------------ log and commitment

    def _append(self, op: Any) -> list[Effect]:
        entry = Entry(self._log.end + 1, op)
        self._log.append(entry, self.weigh(op))
        effects = self._forward((entry,)) if self._successor_is_known else []
        effects.append(entry)
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
        if not self._teaching.sessions:
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
        to = self.successor
        epoch = self.epoch
        committed = self.committed
        return [Send(to, Append(epoch, each.position, committed, each.op)) for each in entries]

    def _teach(self, learner: int, entries: tuple[Entry, ...]) -> list[Effect]:
        return [Send(learner, Teach(self.epoch, entry.position, entry.op)) for entry in entries]
