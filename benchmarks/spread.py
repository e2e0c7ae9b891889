"""How far off a prediction may be: the same on a cluster at the quartiles of its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from shoal.cluster import Cluster
from shoal.cluster.hardware import Device, LinkSpec, MeasuredCalls
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import Prediction
from shoal.plan.workloads import Workload
from shoal.strategy.strategy import Strategy

_Spec = TypeVar("_Spec", Device, LinkSpec)


class SpreadPredictor:
    """Predicts with `low_s` and `high_s` from the spread of the cluster's figures."""

    def __init__(self, workload: Workload, cluster: Cluster):
        self._middle = Predictor(workload, cluster)
        self._fast = Predictor(workload, at_quartile(cluster, fast=True))
        self._slow = Predictor(workload, at_quartile(cluster, fast=False))

    def predict(self, strategy: Strategy, workers: int, settings: PlanSettings) -> Prediction:
        middle = self._middle.predict(strategy, workers, settings)
        fast_s = self._fast.predict(strategy, workers, settings).step_s
        slow_s = self._slow.predict(strategy, workers, settings).step_s
        ends_s = (middle.step_s, fast_s, slow_s)
        return replace(middle, low_s=min(ends_s), high_s=max(ends_s))


def at_quartile(cluster: Cluster, fast: bool) -> Cluster:
    """All figures that have a spread at the end of it that makes steps shorter, or longer."""
    node = cluster.node
    links = {
        key: _moved(getattr(node, key), fast)
        for key in ("fabric", "pcie", "socket_link", "nic")
        if getattr(node, key) is not None
    }
    crowded = tuple((workers, _moved(device, fast)) for workers, device in node.crowded)
    measured = tuple(_moved_calls(calls, fast) for calls in node.measured)
    node = replace(node, crowded=crowded, measured=measured, **links)
    return replace(cluster, device=_moved(cluster.device, fast), node=node)


def _moved(spec: _Spec, fast: bool) -> _Spec:
    changes: dict[str, Any] = {}
    for name, (low, high) in spec.spread.items():
        is_time = name.endswith(("_s", "_pace")) and not name.endswith("per_s")
        value = low if fast == is_time else high
        attribute, _, key = name.partition(".")
        if not key:
            changes[attribute] = value
            continue
        known: Mapping[str, float] = changes.get(attribute) or getattr(spec, attribute)
        changes[attribute] = {**known, key: value}
    return replace(spec, **changes)


def _moved_calls(calls: MeasuredCalls, fast: bool) -> MeasuredCalls:
    if not calls.spread:
        return calls
    seconds = [max(1e-12, pair[0] if fast else pair[1]) for pair in calls.spread]
    points = zip((size for size, _ in calls.points), seconds, strict=True)
    return replace(calls, points=tuple(points))
