"""A cluster whose devices compute one workload at the pace that was measured of it.

Calibration times kernels one by one. In a model they find caches in another state, and a model has
kernels of its own. A profile of the model's passes on the same machine gives one factor for
forward, one for backward and one for the update; splits and other batches are priced by kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shoal.cluster.cluster import Cluster
from shoal.cluster.hardware import Device
from shoal.plan.step.kernel_time import KernelModel
from shoal.plan.sync_price.base import update_s
from shoal.plan.workloads.workload import Split, Workload

Quartiles = tuple[float, float]


@dataclass(frozen=True)
class ModelProfile:
    """Seconds of one worker's passes over `rows`, while `workers` computed at the same time."""

    workers: int
    rows: int
    forward_s: float
    backward_s: float
    update_s: float
    quartiles: dict[str, Quartiles] = field(default_factory=dict, hash=False)  # by the names above


def profiled(cluster: Cluster, workload: Workload, profiles: Sequence[ModelProfile]) -> Cluster:
    """Each number of workers takes the profile of the nearest one."""
    node = cluster.node
    crowded = tuple(
        (workers, _paced(device, workload, _nearest(profiles, workers)))
        for workers, device in node.crowded
    )
    device = _paced(cluster.device, workload, _nearest(profiles, node.devices))
    return replace(cluster, device=device, node=replace(node, crowded=crowded))


def _nearest(profiles: Sequence[ModelProfile], workers: int) -> ModelProfile:
    return min(profiles, key=lambda one: abs(math.log(one.workers / workers)))


def _paced(device: Device, workload: Workload, profile: ModelProfile) -> Device:
    predicted = _predicted(device, workload, profile.rows)
    paces = {name: getattr(profile, f"{name}_s") / seconds for name, seconds in predicted.items()}
    spread = {
        f"{name}_pace": (
            profile.quartiles[f"{name}_s"][0] / seconds,
            profile.quartiles[f"{name}_s"][1] / seconds,
        )
        for name, seconds in predicted.items()
        if f"{name}_s" in profile.quartiles
    }
    return replace(
        device,
        forward_pace=paces["forward"],
        backward_pace=paces["backward"],
        update_pace=paces["update"],
        spread=spread,  # in place of that of the figures, which these passes contain
    )


def _predicted(device: Device, workload: Workload, rows: int) -> dict[str, float]:
    model = KernelModel(device, workload.precision.compute)
    split = Split(microbatch=rows)
    forward_s = 0.0
    backward_s = 0.0
    parameters = 0.0
    for number, run in enumerate(workload.runs):
        cost = workload.cost(number, split)
        forward_s += run.count * model.time(cost.forward).seconds
        backward = (*cost.backward_input, *cost.backward_weight)
        backward_s += run.count * model.time(backward, backward=True).seconds
        parameters += run.count * cost.parameters
    held = workload.tensors(tuple(run.count for run in workload.runs), split)
    tensors = 0 if held is None else len(held.shapes)
    updating_s = update_s(device, workload.precision, parameters, tensors)
    return {"forward": forward_s, "backward": backward_s, "update": updating_s}
