"""What joins hosts, by what was measured between them: Shoal's own TCP transport, or Gloo.

Gradients are large messages, so these decide. Where they take equally long, small ones do: the
losses and flags of every step. Where nothing is clearly better, it is TCP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.cluster.hardware import MeasuredCalls
from shoal.cluster.units import show_bytes, show_seconds

TCP, GLOO = "tcp", "gloo"
_CLEARLY = 0.95  # of the other's time; quartiles may not overlap either


class BetweenChoice(NamedTuple):
    """The executor between hosts, and the measurement that decided."""

    executor: str
    why: str


def choose_between(measured: Sequence[MeasuredCalls]) -> BetweenChoice | None:
    """None where not both were measured."""
    known = {calls.executor: calls for calls in measured if calls.kind == "all_reduce"}
    if TCP not in known or GLOO not in known:
        return None
    tcp, gloo = (_times(known[name]) for name in (TCP, GLOO))
    sizes = sorted(tcp.keys() & gloo.keys())
    for size in sizes[-1:] + sizes[:1]:
        for best, other in ((tcp[size], gloo[size]), (gloo[size], tcp[size])):
            if best.is_clearly_below(other):
                return BetweenChoice(best.executor, _why(size, best, other))
    return BetweenChoice(TCP, "TCP and Gloo take equally long")


class _Times(NamedTuple):
    executor: str
    median_s: float
    low_s: float
    high_s: float

    def is_clearly_below(self, other: _Times) -> bool:
        return self.median_s <= _CLEARLY * other.median_s and self.high_s < other.low_s


def _times(calls: MeasuredCalls) -> dict[float, _Times]:
    """By bytes."""
    spread = calls.spread or tuple((seconds, seconds) for _, seconds in calls.points)
    return {
        size: _Times(calls.executor, seconds, low_s, high_s)
        for (size, seconds), (low_s, high_s) in zip(calls.points, spread, strict=True)
    }


def _why(size: float, best: _Times, other: _Times) -> str:
    took, others = show_seconds(best.median_s), show_seconds(other.median_s)
    return (
        f"an all-reduce of {show_bytes(size)} took {took} over {best.executor}, {others} over "
        f"{other.executor}"
    )
