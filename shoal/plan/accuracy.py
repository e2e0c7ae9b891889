"""How far predictions are from published runs, by kind, and which plans that leaves equal.

The tables of `benchmarks/validation/sources.py`, to which no constant was fitted, predicted by
presets: a source is all tables of one paper or project, and its rows lie in the ranges of the other
sources about as often as a range says. Tables that constants were fitted to
(`benchmarks/validation/published.py`) are nearer. `python -m benchmarks published` prints these
figures. One GPU that was measured has a range of its own, and so have cores: with a profile of the
model, calibrated, or as they are described.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from shoal.cluster.hardware import Device
from shoal.plan.prediction import Prediction
from shoal.plan.workloads import Workload


class RunKind(NamedTuple):
    """What decides how well a run is known."""

    model: str  # dense, experts, or a traced script
    precision: str
    hardware: str

    def __str__(self) -> str:
        return f"{self.model} in {self.precision} on {self.hardware}"


DENSE = "a dense transformer"
EXPERTS = "a mixture of experts"
TRACED = "a traced script"
_PRECISIONS = {"bf16": "16 bits", "fp16": "16 bits"}
_FAMILIES = {"A800": "A100", "H200": "H100", "H800": "H100", "GB200": "B200"}
# measured over predicted seconds: 80% of the rows, every source with the same weight, and wider
# the fewer sources there were
RANGES = {
    (DENSE, "16 bits"): (0.88, 1.40),
    (DENSE, "fp8"): (0.83, 1.29),
    (EXPERTS, ""): (0.60, 2.06),
}
# of one GPU that was measured: 19 of 21 runs of GPT-2 on an H200, eager and compiled
MEASURED = (0.94, 1.07)
# of cores: five of six runs of two MLPs, alone, under ddp and zero(2), on a machine that others use
LOCAL = {"profiled": (0.47, 1.2), "calibrated": (0.39, 1.45), "described": (0.9, 2.25)}
_UNSEEN = 1.5  # how much wider, as logarithms, where hardware, precision or model was never seen
SEEN = {
    RunKind(DENSE, "16 bits", "A100"): "Megatron-LM, MegaScale, MPT, torchtitan, fms-fsdp",
    RunKind(DENSE, "16 bits", "H100"): "MPT, Llama 3, torchtitan, KempnerForge",
    RunKind(DENSE, "fp8", "H100"): "NeMo, Megatron-Bridge, torchtitan",
    RunKind(DENSE, "fp8", "B200"): "Megatron-Bridge",
    RunKind(EXPERTS, "16 bits", "H100"): "NeMo AutoModel, Megatron-Bridge",
    RunKind(EXPERTS, "fp8", "H100"): "Megatron-Bridge, DeepSeek-V3",
    RunKind(EXPERTS, "16 bits", "B200"): "Megatron-Bridge",
    RunKind(EXPERTS, "fp8", "B200"): "Megatron-Bridge",
}


def kind_of(workload: Workload, device: Device) -> RunKind:
    limits = workload.limits
    model = DENSE if limits.selective_recompute else TRACED
    found = re.search(r"[A-Z]+\d+", device.name)
    family = device.name if found is None else _FAMILIES.get(found[0], found[0])
    compute = workload.precision.compute
    precision = _PRECISIONS.get(compute, compute)
    return RunKind(EXPERTS if limits.ep > 1 else model, precision, family)


def local_range(device: Device, workers: int) -> tuple[float, float] | None:
    """Of a machine that published runs tell nothing about; None: they do."""
    is_measured = device.source == "measured"
    if device.forward_pace != 1:
        return LOCAL["profiled"]
    if device.synchronous:
        return LOCAL["calibrated" if is_measured else "described"]
    # between several GPUs more was not measured
    return MEASURED if is_measured and workers == 1 else None


def range_of(device: Device, kind: RunKind, workers: int) -> tuple[float, float]:
    """What steps of this kind took of the predicted time."""
    if (local := local_range(device, workers)) is not None:
        return local
    precision = "" if kind.model == EXPERTS else kind.precision
    low, high = RANGES.get((kind.model, precision), RANGES[DENSE, "16 bits"])
    if kind in SEEN:
        return low, high
    middle = math.sqrt(low * high)
    half = math.sqrt(high / low) ** _UNSEEN
    return middle / half, middle * half


def what_was_seen(device: Device, kind: RunKind, workers: int) -> str:
    """One sentence where no published run is like this one: the nearest that are."""
    if local_range(device, workers) is not None or kind in SEEN:
        return ""

    def same(other: RunKind) -> int:
        return sum(one == two for one, two in zip(kind, other, strict=True))

    most = max(map(same, SEEN))
    nearest = "; ".join(f"{one} ({SEEN[one]})" for one in SEEN if same(one) == most)
    return f"no run like this was seen, {kind}: the nearest are {nearest}"


def is_faster(one: Prediction, other: Prediction) -> bool:
    """Whether predictions tell: neither lies in the range of the other."""
    mine = one.effective_s / one.step_s
    theirs = other.effective_s / other.step_s
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
