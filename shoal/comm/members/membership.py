"""Which workers of an elastic run form its group, from one generation to the next.

    generation 1   workers 0 1 2 3       worker 2 is killed in a step; worker 0 notices it first
                   0 leaves the group    1 and 3 lose 0 and leave, too
                   0 1 3 are ready       worker 2 has exited: all members of generation 1 are known
    generation 2   workers 0 1 3         worker 2, started again, asks to be admitted
                   0 leaves the group between two steps, and 1 and 3 follow
    generation 3   workers 0 1 2 3

Each step is a document on a board (`board.py`), which all workers see in one order. The
generation that follows is decided, by the first worker that sees it, once every member of the last
one is ready, has exited or has left for good. A worker that is lost while a generation forms ends
that generation.

Survivors that are inside a call of `job.evaluate`, `job.save` or `job.load` admit no newcomer,
which would not be in that call. The results of these calls are on the same board: a worker that was
interrupted in one which others have ended, or that comes later, takes the result from there. Nor is
one admitted where no survivor could send it the whole state, since all are inside of a step whose
update is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from shoal.comm.members.board import Board, CallResults, Document, GroupMember
from shoal.comm.transport.shm.memfd import Exchange
from shoal.errors import PeerLost, RunOver
from shoal.runtime.waits import until, waiting

T = TypeVar("T")


class Generation(NamedTuple):
    """Members in the order of their ranks."""

    number: int
    members: tuple[GroupMember, ...]


class _Ready(NamedTuple):
    after: int  # the generation that it has left
    admits: bool
    can_send: bool  # the whole state, to a newcomer


class GroupMembership:
    """One worker's view. `size` workers may take part."""

    def __init__(self, board: Board, me: GroupMember, size: int, patience_s: float = float("inf")):
        self.board = board
        self.me = me
        self.size = size
        self.generation = Generation(0, ())
        self._latest = self.generation
        board.take = self._take
        self._patience_s = patience_s
        self._ready: dict[GroupMember, _Ready] = {}
        self._left: set[GroupMember] = set()
        self._said: dict[tuple[int, int, GroupMember], bytes] = {}
        self._results = CallResults(board)
        self.has_finished = False  # a worker has come to the end of the script
        self.has_begun = False  # there is a state that newcomers have to get from a member

    # ------------------------------------------------------------------ generations

    def regroup(self, admits: bool, can_send: bool, form: Callable[[Generation, Exchange], T]) -> T:
        """What `form` returns for the first generation that all of its members could form.

        A newcomer is in it where all members admit one, and one of them can send it the state.
        `form` is given an all-gather of a few bytes. This worker has left its last group before.
        RunOver where the others have finished.
        """
        while True:
            self._agree(admits, can_send)
            try:
                return form(self.generation, self._exchange_of(self.generation))
            except PeerLost as lost:
                if lost.after_s is not None:
                    raise

    def has_newcomers(self) -> bool:
        """Whether a worker asks to be admitted; one system call where nothing was written."""
        self.board.look()
        return bool(self._newcomers())

    def check(self) -> None:
        """PeerLost if a member was lost or has left the generation: for work without messages.

        A member that has finished is no loss.
        """
        members = self.generation.members
        exited = [m for m in members if m not in self._left and self.board.has_exited(m)]
        self.board.look()  # those have exited before, so what they have written is final
        lost = [m for m in exited if m not in self._left]
        if lost or self._has_given_up(self.generation):
            peer = lost[0].worker if lost else None
            raise PeerLost(self.me.worker, peer, "training")

    def begin(self) -> None:
        """All members have the same state, which must not get lost from now on."""
        if not self.has_begun:
            begun = {"begun": self.generation.number}
            self.board.append(lambda: None if self.has_begun else begun)

    def leave(self) -> None:
        """This worker takes part in nothing more."""
        self.board.append(lambda: {"left": self.me})

    def _agree(self, admits: bool, can_send: bool) -> None:
        after = self.generation.number
        ready = {"ready": self.me, "after": after, "admits": admits, "can_send": can_send}
        self.board.append(lambda: ready)
        self.generation = self._until(self._next_of_mine, "the next generation of workers")

    def _next_of_mine(self) -> Generation | None:
        self.board.append(self._decide)
        is_next = self._latest.number > self.generation.number
        return self._latest if is_next and self.me in self._latest.members else None

    def _decide(self) -> Document | None:
        """Who forms the next generation, if that is known."""
        last = self._latest
        if last.number == 0:
            workers = {member.worker for member in self._ready}
            if any(w not in workers and not self.board.is_absent(w) for w in range(self.size)):
                return None
            return self._next_generation(list(self._ready))
        if any(not self._is_ready(m) and not self._is_gone(m) for m in last.members):
            return None
        survivors = [m for m in last.members if self._is_ready(m) and not self._is_gone(m)]
        if not survivors:
            raise RunOver(self.me.worker)
        ready = [self._ready[member] for member in survivors]
        admits = all(r.admits for r in ready) and any(r.can_send for r in ready)
        return self._next_generation(survivors + (self._newcomers() if admits else []))

    def _next_generation(self, members: list[GroupMember]) -> Document:
        present = sorted(member for member in members if not self._is_gone(member))
        return {"generation": self._latest.number + 1, "members": present}

    def _newcomers(self) -> list[GroupMember]:
        return [m for m in self._ready if m not in self._latest.members and not self._is_gone(m)]

    def _is_ready(self, member: GroupMember) -> bool:
        ready = self._ready.get(member)
        return ready is not None and ready.after == self._latest.number

    def _is_gone(self, member: GroupMember) -> bool:
        if member not in self._left and self.board.has_exited(member):
            self._left.add(member)
        return member in self._left

    # ------------------------------------------------------------------ forming a group

    def _exchange_of(self, generation: Generation) -> Exchange:
        rounds = 0

        def exchange(message: bytes) -> list[bytes]:
            nonlocal rounds
            rounds += 1
            said = {"said": [generation.number, rounds, self.me], "text": message.decode()}
            self.board.append(lambda: said)
            return [self._hear(generation, rounds, member) for member in generation.members]

        return exchange

    def _hear(self, generation: Generation, round_number: int, member: GroupMember) -> bytes:
        def heard() -> bytes | None:
            gone = self._is_gone(member)  # before reading: then what it has written is final
            self.board.look()
            text = self._said.get((generation.number, round_number, member))
            if text is None and (gone or self._has_given_up(generation)):
                doing = f"forming generation {generation.number}"
                raise PeerLost(self.me.worker, member.worker, doing)
            return text

        return self._until(heard, f"worker {member.worker}")

    def check_forming(self) -> None:
        """PeerLost where a member of this generation is lost before it has formed."""
        self.board.look()
        generation = self.generation
        lost = [member.worker for member in generation.members if self._is_gone(member)]
        if lost or self._has_given_up(generation):
            doing = f"forming generation {generation.number}"
            raise PeerLost(self.me.worker, lost[0] if lost else None, doing)

    def _has_given_up(self, generation: Generation) -> bool:
        """Whether a member has left this generation, since another one was lost."""
        ready = [self._ready.get(member) for member in generation.members]
        return any(r is not None and r.after >= generation.number for r in ready)

    # ------------------------------------------------------------------ calls of all workers

    def hold(self, steps: int, act: Callable[[], T], regroup: Callable[[], None]) -> T:
        """What `act` returns, which has to be JSON; or what it returned to those who took part.

        `regroup` is called where a worker was lost meanwhile; then it is done again.
        """
        key = self._results.next_key(steps)
        while True:
            self.board.look()
            if key in self._results:
                return self._results.get(key)  # type: ignore[no-any-return]
            try:
                return self._results.share(key, act)
            except PeerLost as lost:
                if lost.after_s is not None:
                    raise
                regroup()

    # ------------------------------------------------------------------ the board

    def _until(self, found: Callable[[], T | None], whom: str) -> T:
        doing = f"forming the group after generation {self.generation.number}"
        return until(
            found,
            waiting(f"worker {self.me.worker}", whom, doing),
            self._patience_s,
            lambda: PeerLost(self.me.worker, None, doing, self._patience_s),
        )

    def _take(self, document: Document) -> None:
        if "ready" in document:
            member = GroupMember(*document["ready"])
            self._ready[member] = _Ready(
                document["after"], document["admits"], document["can_send"]
            )
        elif "members" in document:
            members = tuple(GroupMember(*member) for member in document["members"])
            self._latest = Generation(document["generation"], members)
            self._said.clear()
        elif "said" in document:
            generation, round_number, member = document["said"]
            self._said[generation, round_number, GroupMember(*member)] = document["text"].encode()
        elif "left" in document:
            self._left.add(GroupMember(*document["left"]))
            self.has_finished = True
        elif "begun" in document:
            self.has_begun = True
        else:
            self._results.take(document)
