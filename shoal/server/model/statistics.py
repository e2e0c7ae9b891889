"""Counts of pushes and pulls, as reports of a run show them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from shoal.server.consistency import Ledger, PushVerdict
from shoal.server.model.membership import Membership


class LoggedCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What follows from the log alone: all replicas count the same."""

    missed_updates: dict[int, int] = {}
    returns: dict[int, int] = {}


class Statistics:
    """What one server has counted for one model.

    A replica counts the pushes that are sent again and the pulls that it has answered itself.
    """

    def __init__(self) -> None:
        self.repeated_pushes = 0
        self.is_from_start = True  # else what was before it got the state of another replica lacks
        self._missed_updates: Counter[int] = Counter()  # between a pull and its push
        self._steps_ahead: Counter[int] = Counter()  # of the slowest worker, at a pull
        self._returns: dict[int, int] = {}  # worker -> steps that it missed while it was away

    def note_push(self, missed_updates: int) -> None:
        self._missed_updates[max(0, missed_updates)] += 1

    def note_pull(self, steps_ahead: int) -> None:
        self._steps_ahead[max(0, steps_ahead)] += 1

    def note_return(self, worker: int, clock: int, step: int) -> None:
        self._returns[worker] = self._returns.get(worker, 0) + step - clock

    def logged(self) -> LoggedCounts:
        return LoggedCounts(dict(self._missed_updates), dict(self._returns))

    def learn(self, counts: LoggedCounts) -> None:
        """Go on from the counts of another replica."""
        self._missed_updates = Counter(counts.missed_updates)
        self._returns = dict(counts.returns)
        self.is_from_start = False

    def report(self, updates: int, membership: Membership, ledger: Ledger | None) -> dict[str, Any]:
        """The ledger is the leader's; decisions are in the leader's report only."""
        counts = {
            "updates": updates,
            "sent_again": self.repeated_pushes,
            "lost": membership.lost,
            "came_back": {str(w): self._returns[w] for w in sorted(self._returns)},
            "is_complete": self.is_from_start,
        }
        return counts if ledger is None else counts | self._decisions(membership, ledger)

    def _decisions(self, membership: Membership, ledger: Ledger) -> dict[str, Any]:
        workers = sorted(ledger.outcomes)
        return {
            "workers": {
                str(w): {verdict.value: ledger.outcomes[w][verdict] for verdict in PushVerdict}
                for w in workers
            },
            "left_out": {
                str(w): ledger.skipped(w, to_the_end=membership.has_left(w)) for w in workers
            },
            "missed_updates": _by_number(self._missed_updates),
            "steps_ahead": _by_number(self._steps_ahead),
        }


def _by_number(counts: Counter[int]) -> dict[str, int]:
    return {str(number): counts[number] for number in sorted(counts)}
