"""What all ranks have to do alike, such as saving and loading: all of them succeed, or none.

    rank 0   writes the checkpoint ─ "3fa9…" ─┐
    rank 1                           ─ ""     ─┼─▶ every rank has the texts of all
    rank 2                           ─ ""     ─┘

No rank returns before all have answered. A text has at most 500 bytes; it takes one all-gather.
Where ranks may be lost it goes through files, over the survivors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.comm.group import Group
from shoal.comm.members.board import Document, FileBoard
from shoal.comm.objects import all_gather_bytes
from shoal.errors import BadInput, CheckpointError, Desync, NotBuilt
from shoal.runtime.files import StepCount
from shoal.runtime.run_dir import RunDir, read_count
from shoal.runtime.waits import Backoff
from shoal.sync import Comeback
from shoal.train.job_state import JobState
from shoal.train.step.step import Step

if TYPE_CHECKING:
    from shoal.comm.members.elastic_sum import ElasticSum
    from shoal.comm.members.meetings import Meeting
    from shoal.train.elastic_training import ElasticTraining

T = TypeVar("T")

_MAX_BYTES = 500
_FAILED = "failed: "
_MAX_LOADS = 8


class Agreement:
    """All ranks call its methods in the same order."""

    def __init__(self, group: Group, elastic_sum: ElasticSum | None = None):
        """`elastic_sum` is for runs where ranks may be lost."""
        self._group = group
        self._elastic_sum = None if elastic_sum is None else elastic_sum.beside("agreement")

    def begin(self, meeting: str) -> None:
        """See `ElasticSum.begin`."""
        if self._elastic_sum is not None:
            self._elastic_sum.begin(meeting)

    def run(self, action: Callable[[], tuple[T, str]]) -> tuple[T, dict[int, str]]:
        """The result of `action`, and its text on every surviving rank.

        If it fails with BadInput on one rank, it fails on all of them.
        """
        try:
            result, text = action()
        except BadInput as error:
            self._exchange(f"{_FAILED}{error}")
            raise
        texts = self._exchange(text)
        for rank, text in texts.items():
            if text.startswith(_FAILED):
                raise CheckpointError(f"{text.removeprefix(_FAILED)} (rank {rank})")
        return result, texts

    def load(self, path: Path, read: Callable[[], tuple[T, str]]) -> T:
        """What `read` gives when it has the same text, a digest, on all ranks.

        Where others save at the same path, ranks may read different versions: then they read
        again.
        """
        pause = Backoff(0.01, 1.0)  # seconds: the first pause, and the longest
        for _ in range(_MAX_LOADS):
            result, texts = self.run(read)
            if len(set(texts.values())) == 1:
                return result
            pause()
        read_by = ", ".join(f"rank {rank} {digest[:12]}" for rank, digest in texts.items())
        raise CheckpointError(
            f"the ranks read different checkpoints at {path}, and nothing was loaded: {read_by}; "
            "give all hosts the same folder"
        )

    def _exchange(self, text: str) -> dict[int, str]:
        """The texts of all surviving ranks."""
        size = self._group.size
        if size == 1:
            return {0: text}
        data = text.encode(errors="replace")[:_MAX_BYTES]
        if self._elastic_sum is None:
            found = all_gather_bytes(self._group, data, _MAX_BYTES)
            return {rank: row.decode(errors="replace") for rank, row in enumerate(found)}
        rows = self._elastic_sum.gather([data.decode(errors="replace")], range(size))
        return {rank: str(row[0]) for rank, row in rows.items()}


class JobMeetings:
    """A worker that came back takes its place, and does not do again what was done meanwhile."""

    def __init__(self, state: JobState, agreement: Agreement, elastic: ElasticTraining | None):
        self._state = state
        self._agreement = agreement
        self._elastic = elastic
        self._services = state.context.services
        self._meetings = self._services.meetings
        self.takes_returns = self._meetings is not None  # lost workers may come back

    def hold(self, act: Callable[[], T], call: str | None = None) -> T:
        """Do what all workers do together, or get what it returned to the others.

        `call`: the script's own, which all ranks have to make.
        """
        if call is not None and self._services.calls is not None:
            self._services.calls.note(call, self._state.steps)
        if self._elastic is not None:
            return self._elastic.hold(act)
        if self._meetings is None:
            return act()
        self.come_back()

        def begin(meeting: Meeting) -> T:
            for step in self._state.models:
                step.sync.meet(meeting.number, meeting.incarnations)
            if self._services.elastic_sum is not None:
                self._services.elastic_sum.begin(meeting.name)
            self._agreement.begin(meeting.name)
            return act()

        result: T = self._meetings.hold(self._state.stream.steps_passed, begin)
        return result

    def add(self, step: Step) -> None:
        """The job trains by this step."""
        calls = self._services.calls
        if self._elastic is not None:
            if step.is_own_loop or step.embeddings:
                what = "job.setup" if step.is_own_loop else "shoal.Embedding"
                raise NotBuilt(f"{what} is not built for elastic runs: leave out elastic")
            step.around = self._elastic.train
        elif calls is not None and step.sync.lead is not None and not step.is_own_loop:
            calls.lead = step.sync.lead
            step.around = calls.train

    def end(self) -> None:
        """The script calls nothing more."""
        if self._services.calls is not None:
            self._services.calls.note(None, self._state.steps)

    def come_back(self) -> None:
        """Take the place of a process of this worker that was lost, at the present step."""
        if self._elastic is not None:
            self._elastic.join()
            return
        meetings = self._meetings
        if meetings is None or not meetings.is_away or not self._state.models:
            return
        if meetings.take_place(self._take_place) >= 0:
            for step in self._state.models:
                step.sync.catch_up()

    def _take_place(self) -> int:
        found = [step.sync.come_back() for step in self._state.models]
        returns = [returned for returned in found if returned is not None]
        if not returns:
            self._state.note_return(Comeback(0, 0))
            return -1  # it was lost before it had joined the others: it is there from the start
        latest = max(returns)
        for step in self._state.models:
            step.steps = step.update.steps = latest.step
        self._state.go_on_after(latest.step, latest.step, None)
        self._state.note_return(latest)
        return latest.step


_END = "nothing more, at the end of its training,"


class CallLog:
    """What each rank has called of that which all ranks call: a save on one would wait forever.

        rank 0   step 1 … 7   job.save, which waits for rank 1
        rank 1   step 1 … 9   the end of its training

    Where the n-th call of two ranks differs, the second of them to come says so. Under ps a rank
    may also be inside a step that cannot end before another one has pushed, which waits in a call.
    Each writes where it is before it looks where the others are, so one of them sees it.

    It is of one rank of run `number`, whose ranks see one folder, and do not come back.
    """

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
