"""A cluster whose devices compute one workload at the pace that was measured of it.

Calibration times kernels one by one. In a model they find caches in another state, and a model has
kernels of its own. A profile of the model's passes on the same machine gives one factor for
forward, one for backward and one for the update; splits and other batches are priced by kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.cluster import Cluster, Noise
from shoal.cluster.hardware import Device, MeasuredCalls
from shoal.plan.step.collective_time import RankGroup, collective_time
from shoal.plan.step.layer_time import KernelModel
from shoal.plan.step.stragglers import expected_max
from shoal.plan.sync_price import update_s
from shoal.plan.workloads import Split, Workload, parameters_of

Quartiles = tuple[float, float]
_MOST_JITTER = 2.0
_HALVINGS = 20


@dataclass(frozen=True)
class ModelProfile:
    """Seconds of one worker's passes over `rows`, while `workers` computed at the same time."""

    workers: int
    rows: int
    forward_s: float
    backward_s: float
    update_s: float
    quartiles: dict[str, Quartiles] = field(default_factory=dict, hash=False)  # by the names above
    slowest: float = 1.0  # the step of the slowest worker over that of all, the mean over steps
    gradients_s: float | None = None  # the sum of all gradients over workers, once all have begun
    # shares of the parameters whose gradients are there, and of backward at that moment
    ready: tuple[tuple[float, float], ...] = ()
    # a device that runs behind its host: a step without waits, and the host's part of it
    whole_s: float | None = None
    host_s: float | None = None


def profiled(cluster: Cluster, workload: Workload, profiles: Sequence[ModelProfile]) -> Cluster:
    """Each number of workers takes the profile of the nearest one."""
    node = cluster.node
    paces = [
        (one.workers, _paces(cluster.device_of(one.workers), workload, one)) for one in profiles
    ]
    most = max(profiles, key=lambda one: one.workers)
    crowded = tuple((workers, _paced(device, paces, workers)) for workers, device in node.crowded)
    device = _paced(cluster.device, paces, node.devices)
    if most.whole_s is not None and most.host_s is not None:
        # the host does its own part of a step while the device is behind
        left_s = most.host_s + device.step_s - most.whole_s
        device = replace(device, step_s=min(device.step_s, max(0.0, left_s)))
    measured = _paced_calls(cluster, workload, most)
    noise = _noise(cluster.noise, most)
    node = replace(node, crowded=crowded, measured=measured)
    return replace(cluster, device=device, node=node, noise=noise)


def _noise(known: Noise, profile: ModelProfile) -> Noise:
    """The jitter that makes the slowest of so many workers as slow as it was."""
    if profile.workers == 1:
        return known
    low = 0.0
    high = _MOST_JITTER
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_more = expected_max(Noise(middle), profile.workers) > profile.slowest
        low, high = (low, middle) if is_more else (middle, high)
    return Noise(jitter=low, source="measured")


def _paced_calls(
    cluster: Cluster, workload: Workload, profile: ModelProfile
) -> tuple[MeasuredCalls, ...]:
    """Calls at the pace of the sum of the model's gradients."""
    measured = cluster.node.measured
    is_inside = 1 < profile.workers <= cluster.node.devices
    if profile.gradients_s is None or not is_inside or not measured:
        return measured
    num_bytes = parameters_of(workload) * workload.precision.gradient_bytes
    group = RankGroup(profile.workers, 1)
    pace = profile.gradients_s / collective_time(cluster, "all_reduce", group, num_bytes).seconds
    return tuple(
        replace(
            calls,
            points=tuple((size, pace * seconds) for size, seconds in calls.points),
            spread=tuple((pace * low, pace * high) for low, high in calls.spread),
        )
        for calls in measured
    )


_Pace = tuple[float, Quartiles | None]  # measured seconds over predicted ones, and quartiles


def _paces(device: Device, workload: Workload, profile: ModelProfile) -> dict[str, _Pace]:
    """`device` is that of a worker among as many as were profiled."""
    found: dict[str, _Pace] = {}
    shorter = 1.0
    if profile.whole_s is not None:  # a step without waits between its passes
        shorter = profile.whole_s / (profile.forward_s + profile.backward_s + profile.update_s)
    for name, seconds in _predicted(device, workload, profile.rows).items():
        seconds /= shorter
        measured = profile.quartiles.get(f"{name}_s")
        quartiles = None if measured is None else (measured[0] / seconds, measured[1] / seconds)
        found[f"{name}_pace"] = (getattr(profile, f"{name}_s") / seconds, quartiles)
    return found


def _paced(device: Device, paces: Sequence[tuple[int, dict[str, _Pace]]], workers: int) -> Device:
    nearest = min(paces, key=lambda known: abs(math.log(known[0] / workers)))[1]
    middles: dict[str, Any] = {name: middle for name, (middle, _) in nearest.items()}
    # in place of the spread of the figures, which these passes contain
    spread = {name: around for name, (_, around) in nearest.items() if around is not None}
    return replace(device, spread=spread, **middles)


def _predicted(device: Device, workload: Workload, rows: int) -> dict[str, float]:
    model = KernelModel(device, workload.precision.compute)
    split = Split(microbatch=rows, flash_attention=True)
    forward_s = backward_s = 0.0
    for number, run in enumerate(workload.runs):
        cost = workload.cost(number, split)
        forward_s += run.count * model.time(cost.forward).seconds
        backward = (*cost.backward_input, *cost.backward_weight)
        backward_s += run.count * model.time(backward, backward=True).seconds
    held = workload.tensors(tuple(run.count for run in workload.runs), split)
    tensors = 0 if held is None else len(held.shapes)
    updating_s = update_s(device, workload.precision, parameters_of(workload), tensors)
    return {"forward": forward_s, "backward": backward_s, "update": updating_s}
