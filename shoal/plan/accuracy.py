"""How far predictions are from published runs, by kind, and which plans that leaves equal.

The tables of `benchmarks/validation/published.py`, each predicted by constants that were fitted to
all others of its GPU: `python -m benchmarks published` prints these figures. A cluster that was
measured has the spread of its own figures instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cluster.hardware import Device
from shoal.plan.prediction import Prediction

ONE_NODE, SEVERAL_NODES, SHARDED = "one node", "several nodes", "zero(3) on several nodes"
# measured over predicted seconds: of 80% of the rows
RANGES = {ONE_NODE: (0.89, 1.22), SEVERAL_NODES: (0.96, 1.16), SHARDED: (0.91, 1.09)}


def kind_of(strategy: str, several_nodes: bool) -> str:
    """The kind of runs that a strategy is held against."""
    if not several_nodes:
        return ONE_NODE
    return SHARDED if strategy.startswith("zero(3") else SEVERAL_NODES


def range_of(device: Device, strategy: str, several_nodes: bool) -> tuple[float, float]:
    """What steps of this kind took of the predicted time."""
    if device.synchronous or device.source == "measured" or device.forward_pace != 1:
        return 1.0, 1.0
    return RANGES[kind_of(strategy, several_nodes)]


def is_faster(one: Prediction, other: Prediction) -> bool:
    """Whether predictions tell: neither lies in the range of the other."""
    mine, theirs = one.effective_s / one.step_s, other.effective_s / other.step_s
    return one.high_s * mine < other.effective_s and one.effective_s < other.low_s * theirs


def places(found: Sequence[Prediction]) -> list[tuple[int, int]]:
    """The first and the last place that each may have; those of equal plans overlap."""
    return [
        (
            1 + sum(is_faster(other, one) for other in found),
            len(found) - sum(is_faster(one, other) for other in found),
        )
        for one in found
    ]
