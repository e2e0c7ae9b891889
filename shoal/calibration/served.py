"""What a parameter server of the host takes, from steps that were measured with one.

Asynchronous workers come back to the server after what they do by themselves. Their cycle is
measured; how long one request takes of the server is what gives that cycle in the closed queue by
which such steps are priced, where the server's cores are the workers' too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from shoal.cluster.hardware import Curve
from shoal.plan.step.relaxed_rules import queue_cycle_s

Found = Mapping[str, Any]
_LEAST = 0.1  # of a request is for its bytes, however long one without bytes took
_HALVINGS = 50


class Served(NamedTuple):
    """Fields of a device."""

    step_s: float = 0.0
    request_s: float = 0.0
    bytes_per_s: float | None = None
    efficiency: Curve = Curve()


def served(found: Found) -> Served:
    """`found` is what one worker has written, while so many measured at the same time."""
    if "served" not in found:
        return Served()
    own_s = found["step"]["median_s"]
    cycle_s = found["served"]["async"]["median_s"]
    lockstep_s = found["served"]["lockstep"]["median_s"]
    request_s = max(0.0, min(cycle_s / found["workers"], cycle_s - own_s))
    rates = _rates(found, own_s, request_s)
    peak, curve = None, Curve()
    if rates:
        peak = max(rates.values())
        curve = Curve(tuple((size, rate / peak) for size, rate in sorted(rates.items())))
    return Served(max(0.0, lockstep_s - own_s), request_s, peak, curve)


def _rates(found: Found, own_s: float, request_s: float) -> dict[float, float]:
    """Bytes a second of a push and pull, by its bytes."""
    rates = {}
    for push in found["served"].get("pushes", ()):
        size = float(push["bytes"])
        away_s = own_s + push["computed"]["median_s"]
        taken_s = _request_s(found, away_s, push["async"]["median_s"])
        rates[size] = size / max(taken_s - request_s, _LEAST * taken_s, 1e-9)
    return rates


def _request_s(found: Found, away_s: float, cycle_s: float) -> float:
    """The request that makes a cycle of this length, by bisection."""
    workers = found["workers"]
    cores = workers * found["threads"]
    low_s, high_s = 0.0, cycle_s
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        busy_s = away_s + workers * middle_s / cores
        if queue_cycle_s(workers, busy_s, middle_s) < cycle_s:
            low_s = middle_s
        else:
            high_s = middle_s
    return high_s
