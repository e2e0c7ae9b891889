"""Fit the few constants of a cluster to measured steps, each within what hardware can do.

The constants are those of a cluster file: how efficient matrix products, memory and links are, and
what launches, messages, waits and steps cost at least. Efficiencies follow

    share(size) = highest * size / (size + half_at)

Constants that the rows do not depend on keep their value. Every constant moves in its logarithm and
stays within its bounds. The sum of absolute errors is made small, and one that leaves its prior
costs the square of its distance. The search starts where the errors, up to one factor that all
rows share, are smallest: where launches and waits take no time, slopes do not show them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, product

import numpy as np
from numpy.typing import NDArray

from shoal.cluster import Cluster
from shoal.cluster.hardware import Curve, LinkSpec

Floats = NDArray[np.float64]
Predict = Callable[[Cluster], Sequence[float]]  # seconds of the rows, on a cluster
# name: the least and the most that hardware and its software have
BOUNDS: Mapping[str, tuple[float, float]] = {
    "matmul_efficiency": (0.2, 0.85),
    "matmul_half_at_flops": (1e7, 1e11),
    "attention_factor": (1.0, 3.0),
    "eager_factor": (1.0, 4.0),
    "overlap_cost": (0.01, 0.9),
    "memory_efficiency": (0.2, 0.95),
    "memory_half_at_bytes": (1e3, 1e8),
    "launch_s": (1e-6, 2e-4),
    "wait_s": (1e-6, 2e-3),
    "call_s": (5e-6, 3e-4),
    "step_s": (1e-4, 0.006),
    "microbatch_s": (1e-5, 5e-3),
    "fabric_efficiency": (0.2, 0.8),
    "fabric_alpha_s": (5e-7, 1e-4),
    "nic_efficiency": (0.85, 0.95),
    "nic_alpha_s": (1e-6, 2e-4),
}
# how far from the cluster's own a constant may be, as a logarithm, for the cost of one error of
# _PRIOR_ERROR: rows that say little about a constant leave it where it was
WIDTHS: Mapping[str, float] = {
    "matmul_efficiency": 0.2,
    "matmul_half_at_flops": 1.0,
    "attention_factor": 0.1,
    "eager_factor": 0.1,
    "overlap_cost": 1.0,
    "memory_efficiency": 0.2,
    "memory_half_at_bytes": 1.0,
    "launch_s": 1.0,
    "wait_s": 2.0,
    "call_s": 1.0,
    "step_s": 2.0,
    "microbatch_s": 2.0,
    "fabric_efficiency": 0.1,
    "fabric_alpha_s": 0.5,
    "nic_efficiency": 0.02,
    "nic_alpha_s": 0.5,
}
EAGER = "eager"  # a kernel factor: of norms, additions and activations that are not fused
AMPERE = "ampere attention"  # a kernel factor: of attention that was written for the A100
_PRIOR_ERROR = 0.005
_LAUNCHES = (None, 2e-5, 6e-5)  # further starts; None: as the cluster has it
_WAITS = (None, 3e-4)
_SMALL = 0.02  # errors below this weigh by their square
_NO_SLOPE = 1e-6
_AT_BOUND = 1e-3  # of a logarithm


@dataclass(frozen=True)
class Fitted:
    cluster: Cluster
    values: dict[str, float]  # of the constants that the rows depend on
    error: float  # mean absolute error of the logarithm

    @property
    def at_bound(self) -> dict[str, str]:
        """The constants that ended at one of their bounds, and at which."""
        found = {}
        for name, value in self.values.items():
            low, high = (abs(math.log(value / bound)) < _AT_BOUND for bound in BOUNDS[name])
            if low or high:
                found[name] = "lowest" if low else "highest"
        return found


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
        "attention_factor": device.factor_of("attention"),
        "eager_factor": device.factor_of(EAGER),
        "overlap_cost": device.overlap_cost,
        "memory_efficiency": device.memory_efficiency.points[-1][1],
        "memory_half_at_bytes": half_size(device.memory_efficiency),
        "launch_s": device.launch_s,
        "wait_s": device.wait_s,
        "call_s": device.call_s,
        "step_s": device.step_s,
        "microbatch_s": device.microbatch_s,
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
        kernel_factors={
            **cluster.device.kernel_factors,
            "attention": values["attention_factor"],
            "attention backward": values["attention_factor"],
            EAGER: values["eager_factor"],
        },
        overlap_cost=values["overlap_cost"],
        launch_s=values["launch_s"],
        wait_s=values["wait_s"],
        call_s=values["call_s"],
        step_s=values["step_s"],
        microbatch_s=values["microbatch_s"],
        source="fit",
        assumed=(),
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
        assumed=(),
    )


def fit(
    cluster: Cluster,
    measured_s: Sequence[float],
    predict: Predict,
    rounds: int = 20,
    weights: Sequence[float] | None = None,
    near: Mapping[str, float] | None = None,
    on_error: Callable[[float], None] = lambda error: None,
) -> Fitted:
    """Constants for which `predict` is nearest to what was measured, from those of `cluster`.

    `on_error` hears the mean absolute error of every point that is tried. The search starts at
    `near`, where that is given; the prior is always that of `cluster`.
    """
    from scipy.optimize import least_squares  # of the extra `bench`

    table = _Table(cluster, measured_s, predict)
    heavy = np.ones(len(measured_s)) if weights is None else np.array(weights)
    starts = table.starts() if near is None else [table.point(table.first | dict(near))]
    start = min(starts, key=lambda point: _common_factor_error(table.residuals(point)))

    def residuals(point: Floats) -> Floats:
        errors = table.residuals(point)
        on_error(float(np.abs(errors).mean()))
        return np.concatenate([errors * heavy, table.stiffness * (point - table.prior)])

    found = least_squares(
        residuals,
        start,
        bounds=(table.low, table.high),
        loss=partial(_loss, len(measured_s)),
        f_scale=_SMALL,
        max_nfev=rounds,
    )
    slopes = np.abs(found.jac[: len(measured_s)]).max(axis=0)
    moved = (slopes > _NO_SLOPE) | (np.abs(found.x - start) > _AT_BOUND)
    values = {name: math.exp(x) for name, x in zip(table.names, found.x, strict=True)}
    depends = {name: values[name] for name in compress(table.names, moved)}
    error = float(np.abs(table.residuals(found.x)).mean())
    return Fitted(with_constants(cluster, values), depends, error)


def _loss(rows: int, z: Floats) -> Floats:
    """Near to absolute errors (soft L1) of the rows, and squares of the priors behind them.

    `z` are squares; the loss and its two derivatives.
    """
    rho = np.stack([z, np.ones_like(z), np.zeros_like(z)])
    root = np.sqrt(1 + z[:rows])
    rho[:, :rows] = 2 * (root - 1), 1 / root, -0.5 / root**3
    return rho


def _common_factor_error(residuals: Floats) -> float:
    """The mean absolute error that one factor on all predictions leaves."""
    return float(np.abs(residuals - np.median(residuals)).mean())


class _Table:
    """Errors of the logarithms of predictions, by the logarithms of constants."""

    def __init__(self, cluster: Cluster, measured_s: Sequence[float], predict: Predict):
        self.cluster = cluster
        self.first = constants_of(cluster)
        self.names = list(self.first)
        self.low = np.log([BOUNDS[name][0] for name in self.names])
        self.high = np.log([BOUNDS[name][1] for name in self.names])
        self.prior = np.log(np.array(list(self.first.values())))
        widths = np.array([WIDTHS[name] for name in self.names])
        self.stiffness = math.sqrt(2 * _SMALL * _PRIOR_ERROR) / widths
        self._goal = np.log(np.array(measured_s))
        self._predict = predict

    def starts(self) -> list[Floats]:
        others = product(_LAUNCHES, _WAITS)
        points = [self.first | _given(launch_s=one, wait_s=two) for one, two in others]
        return [self.point(one) for one in points]

    def point(self, values: Mapping[str, float]) -> Floats:
        inside = np.log(np.array([values[name] for name in self.names]))
        inner = (self.low + _AT_BOUND / 2, self.high - _AT_BOUND / 2)
        return np.asarray(np.clip(inside, *inner), dtype=np.float64)

    def residuals(self, point: Floats) -> Floats:
        values = {name: float(x) for name, x in zip(self.names, np.exp(point), strict=True)}
        predicted = self._predict(with_constants(self.cluster, values))
        return np.asarray(np.log(np.array(predicted)) - self._goal, dtype=np.float64)


def _given(**values: float | None) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}
