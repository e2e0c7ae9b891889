"""What each rank has called of that which all ranks call: a save on one rank would wait forever.

    rank 0   step 1 … 7   job.save, which waits for rank 1
    rank 1   step 1 … 9   the end of its training

Where the n-th call of two ranks differs, the second of them to come says so. Under ps a rank may
also be inside a step that cannot end before another one has pushed, which waits in a call. Each
writes where it is before it looks where the others are, so one of them sees it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from shoal.comm.members.board import Document, FileBoard
from shoal.errors import Desync
from shoal.runtime.files import StepCount
from shoal.runtime.run_dir import RunDir, read_count
from shoal.train.step.step import Step

_END = "nothing more, at the end of its training,"


class CallLog:
    """The view of one rank of run `number`, whose ranks see one folder, and do not come back."""

    lead: int | None = None  # see `Sync.lead`

    def __init__(self, run_dir: RunDir, number: int, rank: int, size: int):
        self._has_exited = run_dir.has_exited
        self._rank = rank
        self._files = [run_dir.begun_steps(f"{number}-{other}") for other in range(size)]
        self._begun = StepCount(self._files[rank])
        self._calls: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)  # after how many
        self._board = FileBoard(run_dir.meetings(number))
        self._board.take = self._take
        self.close = self._begun.close

    def note(self, what: str | None, steps: int) -> None:
        """After so many steps this rank calls `what`, and waits there for all others; None: it
        calls nothing more, and waits for none.
        """
        call = what or _END
        self._board.append(lambda: {"call": call, "rank": self._rank, "steps": steps})
        mine = len(self._calls[self._rank])
        for rank, theirs in self._calls.items():
            if len(theirs) >= mine and theirs[mine - 1][0] != call:
                raise Desync(self._rank, call, rank, theirs[mine - 1][0])
        for rank, file in enumerate(self._files if what is not None else ()):
            begun = read_count(file) or 0  # 0: it is in no step
            if begun and self._is_stuck(begun - 1, steps) and not self._has_exited(rank):
                raise Desync(self._rank, call, rank, f"step {begun}")

    def train(self, step: Step, batch: Any) -> Any:
        """What is called in place of `step.attempt`, where steps wait for pushes of others."""
        calls = len(self._calls[self._rank])
        self._begun.note(step.steps + 1)
        self._board.look()
        for rank, theirs in self._calls.items():
            if len(theirs) > calls and theirs[calls][0] != _END:
                call, steps = theirs[calls]
                if self._is_stuck(step.steps, steps):
                    raise Desync(self._rank, f"step {step.steps + 1}", rank, call)
        try:
            return step.attempt(batch)
        finally:
            self._begun.note(0)

    def _is_stuck(self, begun: int, steps: int) -> bool:
        """Whether step `begun` (from 0) needs more than these steps of a rank that waits."""
        return self.lead is not None and steps < begun - self.lead

    def _take(self, document: Document) -> None:
        if "call" in document:
            self._calls[document["rank"]].append((document["call"], document["steps"]))
