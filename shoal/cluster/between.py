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
    times = {name: _times(known[name]) for name in (TCP, GLOO)}
    sizes = sorted(times[TCP].keys() & times[GLOO].keys())
    for size in sizes[-1:] + sizes[:1]:
        for best, other in ((TCP, GLOO), (GLOO, TCP)):
            took_s, _, high_s = times[best][size]
            other_s, other_low_s, _ = times[other][size]
            if took_s <= _CLEARLY * other_s and high_s < other_low_s:
                took, others = show_seconds(took_s), show_seconds(other_s)
                why = f"an all-reduce of {show_bytes(size)} took {took} over {best}, {others} over "
                return BetweenChoice(best, f"{why}{other}")
    return BetweenChoice(TCP, "TCP and Gloo take equally long")


def _times(calls: MeasuredCalls) -> dict[float, tuple[float, float, float]]:
    """By bytes: the median and the quartiles."""
    spread = calls.spread or tuple((seconds, seconds) for _, seconds in calls.points)
    pairs = zip(calls.points, spread, strict=True)
    return {size: (seconds, *around) for (size, seconds), around in pairs}
