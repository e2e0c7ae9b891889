"""What failures leave of training, and where the rest of the time goes.

    recovery  train  save  train  save  train …  failure  recovery  train  save …
                                        └───────────────┘ lost

Failures come at random, at a constant rate, in recoveries too. Training goes on from the last save
that was complete. A save holds training up, and may be complete later, beside training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Shares:
    """Shares of time; they add up to 1."""

    useful: float
    saves: float = 0.0
    lost: float = 0.0  # work that is done again
    restarts: float = 0.0
    repair: float = 0.0  # nodes that are missing


@dataclass(frozen=True)
class Renewal:
    """Training between failures: what a save and a recovery take."""

    mtbf_s: float
    held_s: float = 0.0  # training waits for a save
    written_s: float = 0.0  # until it is complete, beside training
    recovery_s: float = 0.0

    def shares(self, interval_s: float, repair: float = 0.0) -> Shares:
        """Exact: of a run that lasts t, (t - recovery - written) // cycle intervals are kept."""
        cycle_s = max(interval_s, self.written_s) + self.held_s  # one save ends before the next
        restarts = -math.expm1(-self.recovery_s / self.mtbf_s)
        kept = 1 / cycle_s  # a second
        if not math.isinf(self.mtbf_s):
            first_s = self.recovery_s + self.written_s + cycle_s
            fails = -math.expm1(-cycle_s / self.mtbf_s)
            kept = math.exp(-first_s / self.mtbf_s) / fails / self.mtbf_s
        cycles, useful = kept * cycle_s, kept * interval_s
        saves, lost, there = cycles - useful, 1 - restarts - cycles, 1 - repair
        return Shares(there * useful, there * saves, there * lost, there * restarts, repair)

    @property
    def best_interval_s(self) -> float:
        """The root of x = 1 - exp(-x - held), in units of the mean time between failures."""
        held = self.held_s / self.mtbf_s
        share = 1.0
        for _ in range(100):  # Newton's method, from above
            fails = -math.expm1(-share - held)
            share -= (share - fails) / fails
        return max(share * self.mtbf_s, self.written_s)

    @property
    def young_s(self) -> float:
        return math.sqrt(2 * self.held_s * self.mtbf_s)

    @property
    def daly_s(self) -> float:
        ratio = self.held_s / (2 * self.mtbf_s)
        if ratio >= 1:
            return self.mtbf_s
        return self.young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.held_s


def waiting_share(load: float, spares: int) -> float:
    """Of time that a run waits for a repair: Erlang's loss formula; `load` is repair over MTBF."""
    blocked = 1.0
    for broken in range(1, spares + 2):
        blocked = load * blocked / (broken + load * blocked)
    return blocked


def missing_nodes(load: float, nodes: int, spares: int) -> float:
    """The mean number that a run goes on without, where it does not wait; these do not fail."""
    total, missing = 1.0, 0.0  # over the chance of so many broken nodes
    for broken in range(1, nodes + spares + 1):
        rate = max(1e-300, load * min(1, (nodes + spares + 1 - broken) / nodes)) / broken
        total, missing = 1 + total / rate, max(0, broken - spares) + missing / rate
        if total > 1e18:
            break
    return missing / total
