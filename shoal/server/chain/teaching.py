"""What the tail knows of the learners that it brings up to date."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.server.chain import ChainConfig

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
