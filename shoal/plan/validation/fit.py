"""Fit the few constants of a cluster to measured steps, each within what hardware can do.

The constants are those of a cluster file: how efficient matrix products, memory and links are, and
what launches, messages, waits and steps cost at least. Efficiencies follow

    share(size) = highest * size / (size + half_at)

Constants that the rows do not depend on keep their value. The mean absolute error of the logarithm
is made small by reweighted Gauss-Newton steps; every constant moves in its logarithm and stays
within its bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shoal.cluster.cluster import Cluster
from shoal.cluster.hardware import Curve, LinkSpec

Floats = NDArray[np.float64]
Predict = Callable[[Cluster], Sequence[float]]  # seconds of the rows, on a cluster
# name: the least and the most that hardware and its software have
BOUNDS: Mapping[str, tuple[float, float]] = {
    "matmul_efficiency": (0.2, 1.0),
    "matmul_half_at_flops": (1e7, 1e11),
    "memory_efficiency": (0.2, 1.0),
    "memory_half_at_bytes": (1e3, 1e8),
    "launch_s": (1e-6, 2e-4),
    "wait_s": (1e-6, 2e-3),
    "step_s": (1e-4, 2.0),
    "fabric_efficiency": (0.2, 1.0),
    "fabric_alpha_s": (5e-7, 1e-4),
    "nic_efficiency": (0.2, 1.0),
    "nic_alpha_s": (1e-6, 2e-4),
}
_STEP = 0.02  # of a logarithm, for derivatives
_FARTHEST = 1.0  # of a logarithm, in one iteration
_LAUNCHES = (2e-5, 8e-5)  # further starts: where launches take no time, slopes do not show them
_LEAST_GAIN = 3e-3  # of the error; a smaller one ends the search
_SMALL = 0.02  # errors below this weigh no more


@dataclass(frozen=True)
class Fitted:
    cluster: Cluster
    values: dict[str, float]  # of the constants that the rows depend on
    error: float  # mean absolute error of the logarithm


def saturating(highest: float, half_at: float) -> Curve:
    """highest * size / (size + half_at), at two points a decade."""
    sizes = [10 ** (n / 2) for n in range(8, 29)]
    return Curve(tuple((size, highest * size / (size + half_at)) for size in sizes))


def half_size(curve: Curve) -> float:
    """Where a curve has half of its highest share; its first size where it never has less."""
    half = curve.points[-1][1] / 2
    below = [size for size, share in curve.points if share <= half]
    return below[-1] if below else curve.points[0][0]


def constants_of(cluster: Cluster) -> dict[str, float]:
    """The constants of a cluster, within their bounds."""
    device = cluster.device
    values = {
        "matmul_efficiency": device.matmul_efficiency.points[-1][1],
        "matmul_half_at_flops": half_size(device.matmul_efficiency),
        "memory_efficiency": device.memory_efficiency.points[-1][1],
        "memory_half_at_bytes": half_size(device.memory_efficiency),
        "launch_s": device.launch_s,
        "wait_s": device.wait_s,
        "step_s": device.step_s,
    }
    for name, link in (("fabric", cluster.node.fabric), ("nic", cluster.node.nic)):
        if link is not None:
            values |= {f"{name}_efficiency": link.efficiency, f"{name}_alpha_s": link.alpha_s}
    return {
        name: min(max(value, BOUNDS[name][0]), BOUNDS[name][1]) for name, value in values.items()
    }


def with_constants(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    """The same cluster with these constants; all of `constants_of` must be there."""
    device = replace(
        cluster.device,
        matmul_efficiency=saturating(values["matmul_efficiency"], values["matmul_half_at_flops"]),
        memory_efficiency=saturating(values["memory_efficiency"], values["memory_half_at_bytes"]),
        launch_s=values["launch_s"],
        wait_s=values["wait_s"],
        step_s=values["step_s"],
        source="fit",
    )
    node = replace(
        cluster.node,
        fabric=_link(cluster.node.fabric, "fabric", values),
        nic=_link(cluster.node.nic, "nic", values),
    )
    return replace(cluster, device=device, node=node, source="fit")


def _link(link: LinkSpec | None, name: str, values: Mapping[str, float]) -> LinkSpec | None:
    if link is None:
        return None
    return replace(
        link,
        efficiency=values[f"{name}_efficiency"],
        alpha_s=values[f"{name}_alpha_s"],
        source="fit",
    )


def fit(
    cluster: Cluster, measured_s: Sequence[float], predict: Predict, rounds: int = 12
) -> Fitted:
    """Constants for which `predict` is nearest to what was measured, from those of `cluster`."""
    goal = np.log(np.array(measured_s))
    starts = [constants_of(cluster)]
    starts += [starts[0] | {"launch_s": launch_s} for launch_s in _LAUNCHES]
    searches = [_Search(cluster, goal, predict, start) for start in starts]
    for search in searches:
        search.go(rounds // 4)
    best = min(searches, key=lambda one: one.error)
    best.go(rounds)
    values = {name: math.exp(x) for name, x in zip(best.names, best.point, strict=True)}
    depends = {name: values[name] for name in best.names if name in best.moved}
    return Fitted(with_constants(cluster, values), depends, best.error)


class _Search:
    """A point in the logarithms of constants, and its residuals."""

    def __init__(
        self, cluster: Cluster, goal: Floats, predict: Predict, start: Mapping[str, float]
    ):
        self.cluster = cluster
        self.goal = goal
        self.predict = predict
        self.names = list(start)
        self.low = np.log([BOUNDS[name][0] for name in self.names])
        self.high = np.log([BOUNDS[name][1] for name in self.names])
        self.point: Floats = np.log(np.array(list(start.values())))
        self.residuals = self.at(self.point)
        self.moved: set[str] = set()
        self.damping = 1e-2

    @property
    def error(self) -> float:
        return float(np.abs(self.residuals).mean())

    def at(self, point: Floats) -> Floats:
        values = {name: float(np.exp(x)) for name, x in zip(self.names, point, strict=True)}
        predicted = self.predict(with_constants(self.cluster, values))
        return np.asarray(np.log(np.array(predicted)) - self.goal, dtype=np.float64)

    def go(self, rounds: int) -> None:
        for _ in range(rounds):
            before = self.error
            self.advance()
            if self.error > before * (1 - _LEAST_GAIN):
                return

    def _move(self, point: Floats) -> bool:
        """Go there if the error is smaller."""
        residuals = self.at(point)
        if np.abs(residuals).mean() >= self.error:
            return False
        self.point = point
        self.residuals = residuals
        return True

    def advance(self) -> None:
        """One step that makes the error smaller, if there is one."""
        slopes = self._slopes()
        weights = 1 / np.maximum(np.abs(self.residuals), _SMALL)
        normal = slopes.T @ (slopes * weights[:, None])
        pull = slopes.T @ (self.residuals * weights)
        scale = np.diag(normal).copy()
        scale[scale == 0] = 1.0
        for _ in range(6):
            shift = -np.linalg.solve(normal + np.diag(self.damping * scale + 1e-9), pull)
            point = np.clip(self.point + np.clip(shift, -_FARTHEST, _FARTHEST), self.low, self.high)
            if self._move(point):
                self.damping /= 4
                return
            self.damping *= 8

    def _slopes(self) -> Floats:
        columns = []
        for index, name in enumerate(self.names):
            point = self.point.copy()
            point[index] += _STEP if point[index] + _STEP <= self.high[index] else -_STEP
            change = (self.at(point) - self.residuals) / (point[index] - self.point[index])
            if np.abs(change).max() > 1e-6:
                self.moved.add(name)
            columns.append(change)
        return np.stack(columns, axis=1)
