"""This machine as a cluster, from what its workers measured."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.calibration.device import device_of
from shoal.cluster.cluster import Cluster, Node, Noise
from shoal.cluster.hardware import LinkSpec, MeasuredCalls

Found = Mapping[str, Any]
_QUARTILES_IN_DEVIATIONS = 1.349  # the interquartile range of a normal distribution


def machine_of(documents: Sequence[Found], cores: int, memory_bytes: float) -> Cluster:
    """`documents` are of 1, 2, … workers; the most workers are the devices of the node."""
    most = max(document["workers"] for document in documents)
    devices = {
        found["workers"]: device_of(found, found["memory_bytes"] or memory_bytes / found["workers"])
        for found in documents
    }
    measured = tuple(
        measured_calls(calls, calls["ranks"])
        for found in documents
        for calls in found.get("calls", ())
    )
    is_cpu = all(document["device"] == "cpu" for document in documents)
    node = Node(
        devices=most,
        fabric=_fabric(measured, most),
        cores=cores,
        crowded=tuple(sorted(devices.items())) if is_cpu else (),
        measured=measured,
    )
    noise = Noise(jitter=_jitter(documents[-1]["products"]["fp32"][-1]))
    return Cluster(platform.node() or "host", devices[most], node, noise=noise, source="measured")


def measured_calls(calls: Found, ranks: int) -> MeasuredCalls:
    """One kind of call, by bytes, as a worker has written it."""
    return MeasuredCalls(
        calls["executor"],
        calls.get("kind", "all_reduce"),
        calls.get("algorithm", ""),
        ranks,
        tuple((float(point["bytes"]), point["median_s"]) for point in calls["points"]),
        tuple((point["low_s"], point["high_s"]) for point in calls["points"]),
    )


def _fabric(measured: Sequence[MeasuredCalls], ranks: int) -> LinkSpec | None:
    """The link that gives the measured all-reduce in the closed form of a ring."""
    known = [one for one in measured if one.kind == "all_reduce" and one.executor != "gloo"]
    if not known:
        return LinkSpec("shared memory", 10e9, 5e-6, source="assumed")
    calls = min(known, key=lambda one: abs(one.ranks - ranks))
    small_s = calls.points[0][1]
    (size, large_s), large = calls.points[-1], calls.spread[-1]
    steps = 2 * (calls.ranks - 1)
    moved = steps / calls.ranks * size
    alphas = calls.spread[0]
    return LinkSpec(
        "shared memory" if calls.executor == "shm" else calls.executor,
        moved / max(large_s - small_s, 0.1 * large_s),
        small_s / steps,
        source="measured",
        spread={
            "bytes_per_s": (moved / large[1], moved / large[0]),
            "alpha_s": (alphas[0] / steps, alphas[1] / steps),
        },
    )


def _jitter(step: Found) -> float:
    share: float = (step["high_s"] - step["low_s"]) / _QUARTILES_IN_DEVIATIONS / step["median_s"]
    return max(0.0, share)
