"""A device from what one worker measured, while so many workers measured at the same time.

A product of f operations takes launch + f / (peak * efficiency(f)) on a CPU, so the time of the
smallest call, which is all launch, is taken off before the rate is computed. Points within half a
decade are one point of the curve.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from shoal.cluster import Cluster, Node, Noise
from shoal.cluster.hardware import UPDATE_KERNELS, Curve, Device, LinkSpec, MeasuredCalls
from shoal.cluster.program import PYTORCH
from shoal.plan.step.stragglers import queue_cycle_s
from shoal.plan.workloads import Split
from shoal.plan.workloads.transformer_block import TransformerSizes, block_cost
from shoal.runtime.wording import counted

_HALVINGS = 50
# tiny blocks of a transformer, which show what the host needs to launch their kernels
BLOCKS = 8
BLOCK_WIDTH = 128
BLOCK_HEADS = 2
BLOCK_TOKENS = 64


def _serving(found: Found) -> dict[str, Any]:
    """Fields of a device, from steps whose weights a server held."""
    if "served" not in found:
        return {}
    own_s = found["step"]["median_s"]
    cycle_s = found["served"]["async"]["median_s"]
    lockstep_s = found["served"]["lockstep"]["median_s"]
    request_s = max(0.0, min(cycle_s / found["workers"], cycle_s - own_s))
    fields = {"served_step_s": max(0.0, lockstep_s - own_s), "request_s": request_s}
    rates = {}  # bytes a second of a push and pull, by its bytes
    for push in found["served"].get("pushes", ()):
        size = float(push["bytes"])
        away_s = own_s + push["computed"]["median_s"]
        taken_s = _request_s(found, away_s, push["async"]["median_s"])
        rates[size] = size / max(taken_s - request_s, _LEAST * taken_s, 1e-9)
    if not rates:
        return fields
    peak = max(rates.values())
    curve = Curve(tuple((size, rate / peak) for size, rate in sorted(rates.items())))
    return {**fields, "served_bytes_per_s": peak, "served_efficiency": curve}


def _request_s(found: Found, away_s: float, cycle_s: float) -> float:
    """The request that makes a cycle of this length, by bisection."""
    workers = found["workers"]
    cores = workers * found["threads"]
    low_s = 0.0
    high_s = cycle_s
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        busy_s = away_s + workers * middle_s / cores
        if queue_cycle_s(workers, busy_s, middle_s) < cycle_s:
            low_s = middle_s
        else:
            high_s = middle_s
    return high_s


Found = Mapping[str, Any]
Pair = tuple[float, float]
Measured = tuple[float, float, Pair]  # an amount, its rate, and the quartiles of that
_GAP_S = 1.2e-6  # in profiles of an H200
_LEAST = 0.1  # of a call's time is left for the kernel, however noisy the launch was
_ADAM_BYTES = 28  # read and written for each number, as the price of an update counts them
_MOMENTUM_BYTES = 20
_WAYS = ("forward", "backward")


def device_of(found: Found, memory_bytes: float) -> Device:
    """`found` is what `shoal.observe.calibration.worker` has written."""
    name = str(found["device"])
    cores = counted(found["threads"], "core")
    synchronous = name == "cpu"
    launch_s = found["launches"]["forward"]["median_s"]
    products = found["products"]
    rates = {dtype: _product_rates(rows, synchronous) for dtype, rows in products.items()}
    peaks = {dtype: max(rate for _, rate, _ in rows) for dtype, rows in rates.items()}
    widest = max(peaks, key=lambda dtype: peaks[dtype])
    copies = found["memory"]
    moved = _all_rates(copies, [row["bytes"] for row in copies], synchronous)
    bandwidth = max(rate for _, rate, _ in moved)
    (adam, adam_spread), tensor_s = _update(found["updates"], "adam", _ADAM_BYTES)
    (momentum, momentum_spread), sgd_s = _update(found["updates"], "sgd", _MOMENTUM_BYTES)
    tensor_s = fmean((tensor_s, sgd_s))
    forward = [row for row in products[widest] if row["way"] == "forward"]
    backward = [row for row in products[widest] if row["way"] != "forward"]
    backward_launch_s = found["launches"]["backward"]["median_s"]
    (low_s, high_s), whole_s = _quartiles(found["step"]), found["step"]["median_s"]
    # what is left of a step of one tiny layer without its kernels, its update and its calls
    kernels_s = 2 * launch_s + 3 * backward_launch_s
    update_s = 2 * UPDATE_KERNELS["sgd"] * tensor_s
    step_s = max(0.0, whole_s - kernels_s - update_s - _smallest_s(found, "all_reduce"))
    device = Device(
        name=f"{cores}, {found['workers']} such workers at the same time" if synchronous else name,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=bandwidth,
        peak_flops=peaks,
        matmul_efficiency=_curve(_product_rates(forward, synchronous), peaks[widest]),
        backward_matmul_efficiency=_curve(_product_rates(backward, synchronous), peaks[widest]),
        memory_efficiency=_curve(moved, bandwidth),
        launch_s=launch_s,
        backward_launch_s=backward_launch_s,
        synchronous=synchronous,
        update_bytes_per_s=adam,
        momentum_bytes_per_s=momentum,
        update_launch_s=tensor_s,
        wait_s=_handover_s(found, "hand over", "send"),
        meet_s=_handover_s(found, "meet", "all_reduce"),
        step_s=step_s,
        **_serving(found),
        threads=found["threads"] if synchronous else None,
        source="measured",
        spread={
            **{f"peak_flops.{dtype}": _spread_of_best(rows) for dtype, rows in rates.items()},
            "memory_bytes_per_s": _spread_of_best(moved),
            "launch_s": _quartiles(found["launches"]["forward"]),
            "backward_launch_s": _quartiles(found["launches"]["backward"]),
            "update_bytes_per_s": adam_spread,
            "momentum_bytes_per_s": momentum_spread,
            # with the relative spread of the sample that it was taken from
            "step_s": (step_s * low_s / whole_s, step_s * high_s / whole_s),
        },
    )
    if not synchronous:
        device = replace(device, **_of_gpu(found, peaks["bf16"]))
    named = [*found["named"], *found.get("compiled", ())]
    return replace(device, kernel_factors=_factors(named, device, widest))


def _of_gpu(found: Found, peak: float) -> dict[str, Any]:
    """Fields of a GPU: products by shape, attention by kernel, what the host needs to launch."""
    attention: dict[str, list[tuple[float, ...]]] = {}
    for row in found["attention"]:
        sizes = (row["head"], row["sequence"])
        pairs = zip(_WAYS, row["flops"], strict=True)
        shares = [flops / row[way]["median_s"] / peak for way, flops in pairs]
        attention.setdefault(row["kernel"], []).append((*sizes, *shares))
    block = TransformerSizes(1, BLOCK_WIDTH, BLOCK_HEADS, sequence=BLOCK_TOKENS, dropout=False)
    launches = {}
    for kernels, took in found["hosts"].items():
        program = PYTORCH._replace(kernels=kernels)
        cost = block_cost(block, 2, Split(flash_attention=True, program=program), 4)
        backward = len(cost.backward_input) + len(cost.backward_weight)
        launches[kernels] = took["forward"]["median_s"] / len(cost.forward)
        launches[f"{kernels} backward"] = took["backward"]["median_s"] / backward
    (fused, _), _ = _update(found["updates"], "fused adam", _ADAM_BYTES)
    return {
        "products": tuple(
            (row["m"], row["n"], row["k"], _flops(row) / row["median_s"] / peak)
            for row in _longer_than_calls(found["products"]["bf16"])
        ),
        "attention": {kernel: tuple(points) for kernel, points in attention.items()},
        "launches_s": launches,
        "gap_s": _GAP_S,
        "fused_update_bytes_per_s": fused,
        "watts": found["watts"],
    }


def _flops(row: Found) -> float:
    return 2.0 * float(row["m"] * row["n"] * row["k"])


def _factors(rows: list[Found], device: Device, dtype: str) -> dict[str, float]:
    """Measured seconds over those that bytes, operations and a launch give."""
    factors = {}
    for row in rows:
        for number, way in enumerate(_WAYS):
            if way not in row:
                continue
            is_backward = way == "backward"
            size = row["bytes"][number]
            flops = row["flops"][number]
            plain_s = device.pass_s(size)
            curve = device.backward_matmul_efficiency if is_backward else device.matmul_efficiency
            if flops and curve is not None:
                plain_s = max(plain_s, flops / (device.peak_flops[dtype] * curve.at(flops)))
            launch_s = device.backward_launch_s if is_backward else device.launch_s
            took_s = row[way]["median_s"]
            left_s = max(_LEAST * took_s, took_s - (launch_s or 0.0) * device.synchronous)
            factors[row["names"][number]] = left_s / plain_s
    return factors


def _all_rates(rows: list[Found], amounts: list[float], synchronous: bool) -> list[Measured]:
    """Without the part of the smallest call that is not its kernel: no modules and autograd."""
    launch_s = (1 - _LEAST) * min(row["median_s"] for row in rows) if synchronous else 0.0
    known = rows if synchronous else _longer_than_calls(rows)
    pairs = [(amount, row) for amount, row in zip(amounts, rows, strict=True) if row in known]
    return sorted((amount, *_rate(amount, row, launch_s)) for amount, row in pairs)


def _longer_than_calls(rows: list[Found]) -> list[Found]:
    """Those that show a GPU: of a shorter kernel one sees what the host needs to launch it."""
    shortest_s = min(row["median_s"] for row in rows)
    return [row for row in rows if row["median_s"] > 2 * shortest_s] or rows


def _product_rates(rows: list[Found], synchronous: bool) -> list[Measured]:
    return _all_rates(rows, [_flops(row) for row in rows], synchronous)


def _rate(amount: float, row: Found, taken_s: float) -> tuple[float, Pair]:
    """An amount over the time that is not launch, and over its quartiles."""
    seconds = [
        max(row[key] - taken_s, _LEAST * row[key]) for key in ("median_s", "high_s", "low_s")
    ]
    return amount / seconds[0], (amount / seconds[1], amount / seconds[2])


def _curve(rows: Iterable[Measured], peak: float) -> Curve:
    groups: dict[int, list[tuple[float, float]]] = {}
    for size, rate, _ in rows:
        groups.setdefault(round(2 * math.log10(size)), []).append((math.log(size), rate / peak))
    columns = [tuple(zip(*group, strict=True)) for _, group in sorted(groups.items())]
    return Curve(tuple((math.exp(fmean(sizes)), min(1.0, median(r))) for sizes, r in columns))


def _spread_of_best(rows: Iterable[Measured]) -> Pair:
    return max(rows, key=lambda row: row[1])[2]


def _quartiles(sample: Found) -> Pair:
    return min(sample["low_s"], sample["high_s"]), max(sample["low_s"], sample["high_s"])


Rate = tuple[float, Pair]


def _update(rows: Iterable[Found], optimizer: str, width: int) -> tuple[Rate, float]:
    """Bytes a second of an optimizer, and seconds of one kernel of a small tensor."""
    by_size = sorted(rows, key=lambda row: row["numel"])
    small, large = (row for row in by_size if row["optimizer"] == optimizer)
    kernels = UPDATE_KERNELS[optimizer.removeprefix("fused ")]
    rate = _rate(large["numel"] * width, large, small["median_s"])
    return rate, small["median_s"] / kernels


def _handover_s(found: Found, name: str, kind: str) -> float:
    """What workers wait that had computed, beyond the call where they do nothing else."""
    if "handover" not in found:
        return 0.0
    took = found["handover"]
    waited_s: float = took[name]["median_s"] - took["work"]["median_s"]
    return max(0.0, waited_s - _smallest_s(found, kind))


def _smallest_s(found: Found, kind: str) -> float:
    """Of a call of Shoal's own with few bytes."""
    seconds: float = sum(
        calls["points"][0]["median_s"] for calls in found.get("calls", ()) if calls["kind"] == kind
    )
    return seconds


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
    last = documents[-1]["products"]["fp32"][-1]
    deviation = (last["high_s"] - last["low_s"]) / _QUARTILES_IN_DEVIATIONS
    noise = Noise(jitter=max(0.0, deviation / last["median_s"]))
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
    known = [one for one in measured if one.kind == "all_reduce"]
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
