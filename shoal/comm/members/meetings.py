"""The calls that all workers of a job make together, where lost workers may come back.

A meeting is a `job.evaluate`, `job.save` or `job.load`. It is known by the step at which it is
called, and by its number among those of that step. Who takes part is decided when the first worker
arrives, and stays so:

    worker 0   step 50: evaluate ────────────────────> 0.93
    worker 1   step 50: evaluate ────────────────────> 0.93
    worker 2   killed at step 41; comes back as another process at step 50, and takes part in
               meetings of later steps. If its script calls this one, it gets the result: 0.93

Decisions and results are lines of one file, written under a lock.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from shoal.comm.members.board import Board, CallResults, Document, FileBoard, GroupMember, Key
from shoal.comm.members.elastic_sum import ElasticSum
from shoal.errors import PeerLost
from shoal.runtime.run_dir import RunDir
from shoal.runtime.waits import until, waiting


class Meeting(NamedTuple):
    """`incarnations` has that of every rank that takes part, -1 for the others."""

    key: Key
    attempt: int  # all that took part in an earlier one were lost
    incarnations: tuple[int, ...]

    @property
    def name(self) -> str:
        return ".".join(map(str, (*self.key, self.attempt)))

    @property
    def number(self) -> int:
        """Grows with every meeting; there are 256 numbers from one to the next."""
        steps, ordinal = self.key
        return (steps + 1 << 30) + (ordinal << 14) + (self.attempt << 8)


class Seat(NamedTuple):
    """Which process of a rank takes part, and in the meetings after which step."""

    incarnation: int = 0
    after: int = -1


class Meetings:
    """The view of one process, `me`, of `size` workers."""

    def __init__(self, board: Board, me: GroupMember, size: int, patience_s: float = float("inf")):
        self._board = board
        board.take = self._take
        self._rank, self._incarnation = me
        self._patience_s = patience_s
        self.is_away = me.incarnation > 0  # it has not taken its place yet
        self._seats = [Seat()] * size
        self._held: dict[Key, Meeting] = {}
        self._results = CallResults(board)
        self._current: Meeting | None = None

    def take_place(self, enter: Callable[[], int]) -> int:
        """Come back: `enter()` returns the step that this worker goes on with, or -1 at the start.

        It takes part in the meetings of later steps. No meeting begins meanwhile.
        """

        def write() -> Document:
            return {"back": [self._rank, self._incarnation, enter()]}

        self._board.append(write)
        self.is_away = False
        return self._seats[self._rank].after

    def hold(self, steps: int, act: Callable[[Meeting], Any]) -> Any:
        """What `act` returns, which has to be JSON; or what it returned to those who took part."""
        key = self._results.next_key(steps)
        doing = f"a meeting at step {steps}"
        is_part = until(
            lambda: self._is_part(key),
            waiting(f"rank {self._rank}", "the other workers", doing),
            self._patience_s,
            lambda: PeerLost(self._rank, None, doing, self._patience_s),
        )
        if not is_part:
            return self._results.get(key)
        meeting = self._current = self._held[key]
        return self._results.share(key, lambda: act(meeting))

    def is_missing(self, rank: int) -> bool:
        """Whether nothing more comes from this rank in the present meeting."""
        incarnation = -1 if self._current is None else self._current.incarnations[rank]
        return incarnation < 0 or self._board.has_exited(GroupMember(rank, incarnation))

    # ------------------------------------------------------------------ beginning

    def _is_part(self, key: Key) -> bool | None:
        """False where others have held it without this worker; None: it is not known yet."""
        self._board.append(lambda: self._decide(key))
        meeting = self._held.get(key)
        if meeting is not None and meeting.incarnations[self._rank] == self._incarnation:
            return True
        return False if key in self._results else None

    def _decide(self, key: Key) -> Document | None:
        """Who takes part, where that is not known and this worker may say it."""
        held = self._held.get(key)
        if key in self._results or (held is not None and not self._is_deserted(held.incarnations)):
            return None
        attempt = 0 if held is None else held.attempt + 1
        incarnations = self._choose(key[0])
        if incarnations[self._rank] != self._incarnation:
            return None
        return {"at": key, "attempt": attempt, "incarnations": incarnations}

    def _choose(self, steps: int) -> tuple[int, ...]:
        """Those that were there before this step; if none of them is left, all that are here."""
        chosen = tuple(p.incarnation if p.after < steps else -1 for p in self._seats)
        if self._is_deserted(chosen):
            chosen = tuple(seat.incarnation for seat in self._seats)
        return chosen

    def _is_deserted(self, incarnations: tuple[int, ...]) -> bool:
        members = map(GroupMember, range(len(incarnations)), incarnations)
        return all(m.incarnation < 0 or self._board.has_exited(m) for m in members)

    def _take(self, document: Document) -> None:
        if "back" in document:
            rank, incarnation, after = document["back"]
            self._seats[rank] = Seat(incarnation, after)
        elif "incarnations" in document:
            key = (document["at"][0], document["at"][1])
            self._held[key] = Meeting(key, document["attempt"], tuple(document["incarnations"]))
        elif "at" in document:
            self._results.take(document)


def open_meetings(
    file: Path, run_dir: RunDir, me: GroupMember, size: int, comes_back: bool, patience_s: float
) -> tuple[Meetings | None, ElasticSum]:
    """Meetings: where lost workers come back; a sum: where a launcher notes their exits."""
    meetings = None
    if comes_back:
        meetings = Meetings(FileBoard(file, run_dir), me, size, patience_s)
    has_exited = run_dir.has_exited if meetings is None else meetings.is_missing
    return meetings, ElasticSum(file, me.worker, has_exited, patience_s)
