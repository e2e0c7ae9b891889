"""Consistency models: which gradients count, when a step is complete, who may start the next.

Pure rules: no wall clock, no threads, no tensors. The leader asks the ledger for its decisions,
and all servers apply them.

    synchronous          a step is complete when every worker has pushed it
    quorum               ... when that many workers have, or all surviving ones. A push for a
                         completed step is late: dropped, or folded into the next step's sum
    bounded staleness=k  each push is a step of its own; a worker may start step t when the
                         slowest live worker has finished t - k steps. k = 0 is synchronous
    asynchronous         each push is a step of its own, and no worker waits. A worker that is
                         far behind the fastest skips steps, so that it does not delay the end

Steps count from 0. A worker's clock is the number of steps that it has finished or skipped.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

import msgspec

from shoal.runtime.wording import counted
from shoal.strategy.ps_term import Ps

MAX_WORKERS = 1 << 16
MAX_LAG_STEPS = 12  # an asynchronous worker that is further behind the fastest skips steps
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
PushVerdict = Literal["admitted", "folded", "dropped"]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the four consistency models, for a number of workers."""

    workers: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)]
    quorum: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)] | None = None
    fold: bool = False
    staleness: Annotated[int, msgspec.Meta(ge=1)] | None = None
    asynchronous: bool = False

    @classmethod
    def of(cls, term: Ps, workers: int) -> Rule:
        quorum = None if term.quorum is None else quorum_of(term.quorum, workers)
        staleness = term.staleness or None  # bounded by 0 steps: synchronous
        return cls(workers, quorum, term.late == "fold", staleness, term.mode == "async")

    @property
    def is_synchronous(self) -> bool:
        return self.quorum is None and not self.applies_each_push

    @property
    def applies_each_push(self) -> bool:
        """Whether every push is a step of its own: bounded staleness and asynchronous."""
        return self.asynchronous or self.staleness is not None

    @property
    def lead(self) -> int | None:
        """Step b waits for workers that have done fewer than b - lead steps; None: for none."""
        return -1 if self.is_synchronous else self.staleness

    def version_for(self, step: int) -> int:
        """The version that weights for `step` have at least."""
        return 0 if self.applies_each_push else step

    def is_too_late(self, step: int, version: int, fastest: int) -> bool:
        """Whether a worker should skip `step`, as far as its latest pull shows."""
        if self.asynchronous:
            return step < fastest - MAX_LAG_STEPS
        return self.quorum is not None and step < version


def quorum_of(quorum: float, workers: int) -> int:
    """Workers that make a quorum. 0.75 of 4 is 3, rounded up; a number above 1 is a count."""
    count = quorum if quorum > 1 else math.ceil(quorum * workers - 1e-9)
    return min(workers, max(1, int(count)))


def quorum_in_words(rule: Rule, counts: str = "worker", takes_back: bool = False) -> str:
    """What the start of a run says. `takes_back`: workers that were lost may come back."""
    assert rule.quorum is not None
    of = f"quorum {rule.quorum} of {counted(rule.workers, counts)}"
    if left := rule.workers - rule.quorum:
        return f"{of}: each step leaves behind up to {counted(left, 'straggler')}"
    if takes_back:
        return f"{of}: a step waits for all workers, and while some are away for all that are there"
    fewer = f"; quorum={rule.workers - 1} leaves one" if rule.workers > 2 else ""
    return f"{of}: no straggler is left behind{fewer}"


class ImpossiblePush(ValueError):
    """A push that no correct worker makes."""


class LedgerState(msgspec.Struct, frozen=True):
    """The attributes of a ledger, for snapshots: counts by worker, in the order of workers."""

    version: int
    start: int
    clocks: list[int]
    pushes: list[int]
    outcomes: list[dict[PushVerdict, int]]
    live: set[int]
    counted: set[int]
    folded: int
    lost_before: list[int]
    updates: int


class Ledger:
    """Which worker has pushed what: the state of a rule.

    `version` counts completed steps; with bounded staleness and asynchronous it counts pushes.
    `updates` counts the same, without those before a checkpoint that was loaded.
    """

    def __init__(self, rule: Rule, start: int = 0):
        self.rule = rule
        none: dict[PushVerdict, int] = dict.fromkeys(get_args(PushVerdict), 0)
        self.outcomes = [dict(none) for _ in range(rule.workers)]
        self.live = set(range(rule.workers))
        self.updates = 0
        self.restart(start)

    def restart(self, start: int) -> None:
        """All workers continue from the step of a checkpoint."""
        self.version = start
        self.start = start
        self.clocks = [start] * self.rule.workers
        self.counted: set[int] = set()
        self.folded = 0
        self.pushes = [0] * self.rule.workers
        self.lost_before = [0] * self.rule.workers  # a worker's pushes for earlier steps are lost

    def judge(self, worker: int, step: int) -> PushVerdict:
        """The verdict on a push. Changes nothing."""
        if worker not in self.live:
            raise ImpossiblePush(f"worker {worker} has left")
        if step < self.clocks[worker]:
            raise ImpossiblePush(f"worker {worker} has pushed step {step} before")
        if self.rule.applies_each_push:
            may_skip = self.rule.asynchronous and step <= self.fastest
            if step != self.clocks[worker] and not may_skip:
                expected = self.clocks[worker]
                raise ImpossiblePush(f"worker {worker} pushes step {step}: expected {expected}")
            return "admitted"
        if step > self.version:
            raise ImpossiblePush(
                f"worker {worker} pushes step {step} before step {self.version} is complete"
            )
        if step == self.version:
            return "admitted"
        return "folded" if self.rule.fold else "dropped"

    def record(self, worker: int, step: int, verdict: PushVerdict) -> None:
        """The push has got this verdict."""
        if verdict == "admitted":
            self.counted.add(worker)
        elif verdict == "folded":
            self.folded += 1
        self.clocks[worker] = step + 1
        self.outcomes[worker][verdict] += 1
        self.pushes[worker] += 1

    def skipped(self, worker: int, to_the_end: bool) -> int:
        """Steps that it has not pushed: up to its latest push, or to the latest of all."""
        last = max(self.clocks) if to_the_end else self.clocks[worker]
        return max(0, last - self.start - self.pushes[worker])

    def complete(self) -> bool:
        """Whether the pushes that count now make up a step, without those that are lost."""
        if self.rule.applies_each_push:
            return bool(self.counted)
        wanted = self.rule.workers
        if self.rule.quorum is not None:
            wanted = min(self.rule.quorum, max(1, len(self.live)))
        lost = {w for w in self.live if self.lost_before[w] > self.version}
        return len(self.counted | lost) >= wanted

    def lose_pushes(self, worker: int, step: int) -> None:
        """Its pushes up to that for `step` were acknowledged, and are not here: they are lost."""
        self.clocks[worker] = max(self.clocks[worker], step + 1)
        self.lost_before[worker] = max(self.lost_before[worker], step + 1)

    def apply(self) -> None:
        """The step is complete: the next one begins."""
        self.version += 1
        self.updates += 1
        self.counted.clear()
        self.folded = 0

    def may_start(self, step: int) -> bool:
        """Whether a worker that has finished `step` steps may take weights for the next."""
        if self.rule.asynchronous:
            return True
        if self.rule.staleness is not None:
            return self.slowest >= step - self.rule.staleness
        return self.version >= step

    @property
    def slowest(self) -> int:
        """The clock of the slowest live worker; of the fastest when none is live."""
        return min(map(self.clocks.__getitem__, self.live), default=self.fastest)

    @property
    def fastest(self) -> int:
        return max(self.clocks)

    def lose(self, worker: int) -> None:
        """It has left or was lost: no step waits for it. What it pushed still counts."""
        self.live.discard(worker)

    @property
    def present(self) -> int:
        """The step that a worker which comes back goes on with: none is trained twice."""
        return self.fastest if self.rule.applies_each_push else self.version

    def rejoin(self, worker: int, step: int) -> None:
        """A worker that was lost goes on with `step`; those before it are left out."""
        self.live.add(worker)
        self.clocks[worker] = max(step, self.clocks[worker])
