"""The order of priced strategies: by predicted time, up to what predictions can tell.

Of those that are within 2% of the fastest, the plainest is the first: the fewest splits of a
replica, and ddp before zero before other ways to agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shoal.plan.candidates import Candidate
from shoal.plan.prediction import Prediction
from shoal.strategy.strategy import Layout

AS_FAST = 1.02  # predictions that are closer than this are no reason to prefer one
_EQUAL = 1.001  # times closer than this are the same
_KNOWN = ("single", "ddp", "zero")  # ways to agree, the plainest first


@dataclass(frozen=True)
class Priced:
    """A strategy with its prediction, and the others of its layout that are never better."""

    candidate: Candidate
    layout: Layout
    prediction: Prediction
    merged: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.prediction.step_s


def merge(found: Iterable[Priced]) -> list[Priced]:
    """Ranked; of one layout, what is neither faster nor smaller than another joins that one."""
    kept: dict[Layout, list[Priced]] = {}
    for one in plainest_first(found):
        same = kept.setdefault(one.layout, [])
        place = _dominating(same, one)
        if place is None:
            same.append(one)
        else:
            names = (*same[place].merged, one.prediction.strategy)
            same[place] = replace(same[place], merged=names)
    return plainest_first(one for group in kept.values() for one in group)


def _dominating(kept: Sequence[Priced], one: Priced) -> int | None:
    for place, other in enumerate(kept):
        if other.prediction.memory.total <= one.prediction.memory.total:
            return place
    return None


def plainest_first(found: Iterable[Priced]) -> list[Priced]:
    """By time, but for the plainest of those that are as fast as the fastest."""
    ordered = sorted(found, key=order)
    if not ordered:
        return []
    fastest_s = min(one.seconds for one in ordered)
    equal = [one for one in ordered if one.seconds <= fastest_s * AS_FAST]
    first = min(equal, key=_plainness)
    return [first, *(one for one in ordered if one is not first)]


def _plainness(one: Priced) -> tuple[int, int, float]:
    strategy = one.candidate.strategy
    name = strategy.sync.name if strategy.sync is not None else _KNOWN[0]
    known = _KNOWN.index(name) if name in _KNOWN else len(_KNOWN)
    return len(strategy.splits), known, one.seconds


def order(one: Priced) -> tuple[float, float, int]:
    """Equal times, up to a thousandth, are ordered by memory and by the length of the notation."""
    time = round(math.log(max(one.seconds, 1e-12)) / math.log(_EQUAL))
    return time, one.prediction.memory.total, len(one.prediction.strategy)
