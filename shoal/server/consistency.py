"""Whose gradients count, when a step is complete, and who may start the next one.

A pure rule: no clocks of the wall, no threads, no tensors. The lead server keeps the ledger, and
its decisions hold for all servers.

    synchronous    a step is complete when every worker has pushed it
    quorum         ... when `quorum` workers have, or all that are left. A push for a step that
                   is closed is late: dropped, or folded into the sum of the next step
    staleness=k    a push counts at once; a worker may start step t when the slowest live worker
                   has finished t - k steps. k = 0 is the synchronous rule
    async          a push counts at once, and nobody waits. A worker that is too far behind the
                   fastest leaves out steps, so that a slow one does not hold up the run's end

Steps count from 0; a worker's clock is the number of steps it has finished or left out.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from typing import Annotated

import msgspec

from shoal.strategy.terms import Ps

MOST_WORKERS = 1 << 16
MOST_BEHIND = 12  # steps of an asynchronous worker behind the fastest before it leaves some out
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the four, for so many workers."""

    workers: Annotated[int, msgspec.Meta(ge=1, le=MOST_WORKERS)]
    quorum: Annotated[int, msgspec.Meta(ge=1, le=MOST_WORKERS)] | None = None
    fold: bool = False
    staleness: Annotated[int, msgspec.Meta(ge=1)] | None = None
    at_once: bool = False

    @classmethod
    def of(cls, part: Ps, workers: int) -> Rule:
        quorum = None if part.quorum is None else quorum_of(part.quorum, workers)
        staleness = part.staleness or None  # bounded by 0 steps: synchronous
        return cls(workers, quorum, part.late == "fold", staleness, part.mode == "async")

    @property
    def needs_everyone(self) -> bool:
        return self.quorum is None and not self.counts_at_once

    def is_passed(self, step: int, version: int, fastest: int) -> bool:
        """Whether a worker has come too late for `step`, as far as its latest pull tells."""
        if self.at_once:
            return step < fastest - MOST_BEHIND
        return self.quorum is not None and step < version

    @property
    def counts_at_once(self) -> bool:
        return self.at_once or self.staleness is not None


def quorum_of(fraction: float, workers: int) -> int:
    """0.75 of 4 is 3; what lies between two numbers of workers is rounded up."""
    return min(workers, max(1, math.ceil(fraction * workers - 1e-9)))


class Verdict(enum.Enum):
    ADMITTED = "admitted"
    FOLDED = "folded"
    DROPPED = "dropped"


class Impossible(ValueError):
    """A push that no worker could have made."""


class Ledger:
    """Who has pushed what; the state of the rule.

    `version` counts the steps that are complete. Where pushes count at once it counts pushes.
    """

    def __init__(self, rule: Rule, start: int = 0):
        self.rule = rule
        self.outcomes = {worker: Counter[Verdict]() for worker in range(rule.workers)}
        self.live = set(range(rule.workers))
        self.restart(start)

    def restart(self, start: int) -> None:
        """Everybody goes on from the same step: that of a checkpoint."""
        self.version = self.start = start
        self.clocks = dict.fromkeys(range(self.rule.workers), start)
        self.counted: set[int] = set()
        self.folded = 0
        self._pushed = Counter[int]()

    def arrive(self, worker: int, step: int) -> Verdict:
        """A whole push of `worker`, whose gradients are those of `step`."""
        if worker not in self.live:
            raise Impossible(f"worker {worker} has left")
        if step < self.clocks[worker]:
            raise Impossible(f"worker {worker} has pushed step {step} before")
        verdict = self._judge(worker, step)
        self.clocks[worker] = step + 1
        self.outcomes[worker][verdict] += 1
        self._pushed[worker] += 1
        return verdict

    def left_out(self, worker: int, to_the_end: bool) -> int:
        """Steps that it has not pushed: up to its latest push, or to everybody's."""
        last = max(self.clocks.values()) if to_the_end else self.clocks[worker]
        return max(0, last - self.start - self._pushed[worker])

    def complete(self) -> bool:
        """Whether the gradients that count now make up a step."""
        if self.rule.counts_at_once:
            return bool(self.counted)
        wanted = self.rule.workers if self.rule.quorum is None else self.rule.quorum
        if self.rule.quorum is not None:
            wanted = min(wanted, max(1, len(self.live)))
        return len(self.counted) >= wanted

    def apply(self) -> None:
        """The step is done: the next one begins."""
        self.version += 1
        self.counted.clear()
        self.folded = 0

    def may_start(self, step: int) -> bool:
        """Whether a worker that has finished `step` steps may take weights for the next."""
        if self.rule.at_once:
            return True
        if self.rule.staleness is not None:
            return self.slowest >= step - self.rule.staleness
        return self.version >= step

    @property
    def slowest(self) -> int:
        """The clock of the slowest live worker; of the fastest when nobody is left."""
        return min((self.clocks[w] for w in self.live), default=max(self.clocks.values()))

    @property
    def fastest(self) -> int:
        return max(self.clocks.values())

    def lose(self, worker: int) -> None:
        """It has left or died: nobody waits for it any more. What it pushed still counts."""
        self.live.discard(worker)

    def _judge(self, worker: int, step: int) -> Verdict:
        if self.rule.counts_at_once:
            may_leave_out = self.rule.at_once and step <= self.fastest
            if step != self.clocks[worker] and not may_leave_out:
                raise Impossible(f"worker {worker} has left out a step before {step}")
            self.counted.add(worker)
            return Verdict.ADMITTED
        if step > self.version:
            raise Impossible(f"worker {worker} pushes step {step} before {self.version} is done")
        if step == self.version:
            self.counted.add(worker)
            return Verdict.ADMITTED
        if not self.rule.fold:
            return Verdict.DROPPED
        self.folded += 1
        return Verdict.FOLDED
