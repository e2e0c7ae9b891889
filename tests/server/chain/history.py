"""Whether reads and additions of one key could have happened one after the other.

A value is a sum of 4**push: base-4 digits 0 or 1 say which pushes it contains, and a digit of 2 or
3 says that one was applied twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

NEVER = float("inf")


@dataclass(frozen=True)
class Added:
    """One push of 4**`push`; `returned_s` is NEVER if it was not acknowledged."""

    push: int
    invoked_s: float
    returned_s: float


@dataclass(frozen=True)
class Observed:
    value: int
    invoked_s: float
    returned_s: float


def contains(value: int, push: int) -> bool:
    return bool(value >> 2 * push & 1)


def violation(added: list[Added], observed: list[Observed]) -> str | None:
    """Why the history of a key that began with 0 is not linearizable; None if it is.

    Additions commute and each is made once. So an order exists if every read contains all that
    was acknowledged before it began and nothing that was begun after it ended, if the reads are
    a rising sequence that agrees with their times, and if they agree with the order of additions.
    """
    twice = [r for r in observed if r.value & _twos(added)]
    if twice:
        return f"{twice[0]} contains a push twice"
    return (
        _wrong_content(added, observed)
        or _wrong_order_of_reads(observed)
        or _wrong_order_of_additions(added, observed)
    )


def _twos(added: list[Added]) -> int:
    return sum(2 << 2 * a.push for a in added)


def _wrong_content(added: list[Added], observed: list[Observed]) -> str | None:
    known = sum(1 << 2 * a.push for a in added)
    for read in observed:
        if read.value & ~known:
            return f"{read} contains what was never pushed"
        for a in added:
            if a.returned_s < read.invoked_s and not contains(read.value, a.push):
                return f"{read} lacks {a}, acknowledged before"
            if read.returned_s < a.invoked_s and contains(read.value, a.push):
                return f"{read} contains {a}, begun later"
    return None


def _wrong_order_of_reads(observed: list[Observed]) -> str | None:
    for first, second in combinations(observed, 2):
        if first.value & second.value not in (first.value, second.value):
            return f"{first} and {second} each contain a push that the other lacks"
        if first.returned_s < second.invoked_s and first.value & ~second.value:
            return f"{second} is older than {first}, which ended before it began"
        if second.returned_s < first.invoked_s and second.value & ~first.value:
            return f"{first} is older than {second}, which ended before it began"
    return None


def _wrong_order_of_additions(added: list[Added], observed: list[Observed]) -> str | None:
    for read in observed:
        inside = [a for a in added if contains(read.value, a.push)]
        latest_s = max((a.invoked_s for a in inside), default=-NEVER)
        for a in added:
            if a.returned_s < latest_s and not contains(read.value, a.push):
                return f"{read} lacks {a} but contains one that was begun after it ended"
    return None
