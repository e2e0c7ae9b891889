"""A machine from what its workers measured, and predictions held against measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.predict import PredictedRun, Verdict, median_error
from benchmarks.spread import at_quartile
from shoal.calibration import measure
from shoal.calibration.device import machine_of
from shoal.calibration.measure import CalibrationOptions, calibrate, worker_counts
from shoal.cluster.toml_file import cluster_text, parse_cluster
from shoal.errors import BadInput
from shoal.plan.step.layer_time import KernelModel
from shoal.plan.step.stragglers import queue_cycle_s
from shoal.plan.workloads import Kernel

FLOPS_PER_S = 40e9
BYTES_PER_S = 10e9
LAUNCH_S = 2e-6


def around(seconds: float) -> dict[str, float]:
    return {"median_s": seconds, "low_s": 0.9 * seconds, "high_s": 1.1 * seconds}


def product(size: int, way: str) -> dict[str, Any]:
    rate = FLOPS_PER_S if way == "forward" else FLOPS_PER_S / 2
    seconds = LAUNCH_S + 2 * size**3 / rate
    return {"way": way, "m": size, "n": size, "k": size, **around(seconds)}


def measured(workers: int) -> dict[str, Any]:
    """What a worker writes that has exactly these rates."""
    ways = ("forward", "input", "weight")
    document: dict[str, Any] = {
        "workers": workers,
        "threads": 1,
        "device": "cpu",
        "memory_bytes": None,
        "products": {"fp32": [product(size, way) for size in (4, 128, 1024) for way in ways]},
        "memory": [
            {"bytes": size, **around(LAUNCH_S + size / BYTES_PER_S)} for size in (64, 1 << 20)
        ],
        "launches": {"forward": around(5e-6), "backward": around(8e-6)},
        "updates": [
            {"optimizer": name, "numel": numel, **around(kernels * 1e-6 + numel * 4e-9)}
            for name, kernels in (("adam", 8), ("sgd", 3))
            for numel in (1, 1 << 20)
        ],
        "named": [
            {
                "names": ("gelu", "gelu_backward"),
                "bytes": (2 << 20, 3 << 20),
                "flops": (0.0, 0.0),
                "forward": around(5e-6 + 7 * (2 << 20) / BYTES_PER_S),
                "backward": around(8e-6 + 9 * (3 << 20) / BYTES_PER_S),
            }
        ],
        "step": around(500e-6),
    }
    if workers > 1:
        points = [{"bytes": 1 << 8, **around(1e-5)}, {"bytes": 1 << 24, **around(1e-2)}]
        call = {"executor": "shm", "kind": "all_reduce", "ranks": workers, "points": points}
        document["calls"] = [call]
    return document


MACHINE = machine_of([measured(1), measured(2)], 2, 8e9)


def test_the_rates_of_kernels_come_back() -> None:
    model = KernelModel(MACHINE.device_of(2), "fp32")
    kernel = Kernel("mlp.up addmm", 2.0 * 1024**3, 1.0, 1024, 1024, 1024)
    assert sum(model.busy(kernel)) == pytest.approx(kernel.flops / FLOPS_PER_S, rel=1e-3)
    slower = sum(model.busy(kernel, backward=True))
    assert slower == pytest.approx(2 * kernel.flops / FLOPS_PER_S, rel=1e-3)


def test_kernels_that_are_slower_than_their_bytes_have_a_factor() -> None:
    device = MACHINE.device_of(2)
    assert device.factor_of("blocks.0 mlp gelu") == pytest.approx(7, rel=0.01)
    assert device.factor_of("mlp gelu_backward") == pytest.approx(9, rel=0.01)
    assert device.factor_of("add") == 1


def test_the_file_of_a_machine_reads_back() -> None:
    text = cluster_text(MACHINE)
    again = parse_cluster(text, "file", "other")
    assert cluster_text(again) == text
    assert [workers for workers, _ in again.node.crowded] == [1, 2]
    core = again.device_of(1)
    assert core.kernel_factors["gelu"] == pytest.approx(7, rel=0.01)
    assert core.synchronous and core.threads == 1
    assert core.backward_launch_s == pytest.approx(8e-6)
    assert core.spread["launch_s"] == pytest.approx((4.5e-6, 5.5e-6))
    calls = again.node.calls("all_reduce", 2)
    assert calls is not None and calls.seconds(1 << 24) == pytest.approx(1e-2)
    assert calls.spread[0] == pytest.approx((0.9e-5, 1.1e-5))
    wrong = text.replace("points = [[256", "points = [[9e9")
    with pytest.raises(BadInput, match=r"m\.toml: the calls of all_reduce need .*increasing"):
        parse_cluster(wrong, "m.toml", "other")


def test_quartiles_make_a_machine_faster_and_slower() -> None:
    fast, slow = (at_quartile(MACHINE, fast=fast).device_of(2) for fast in (True, False))
    assert fast.launch_s < MACHINE.device_of(2).launch_s < slow.launch_s
    assert fast.peak_flops["fp32"] > slow.peak_flops["fp32"]


def test_workers_are_measured_in_powers_of_two_and_all_at_once() -> None:
    assert worker_counts(1) == [1]
    assert worker_counts(12) == [1, 2, 4, 8, 12]
    with pytest.raises(BadInput, match="at least 1"):
        calibrate(CalibrationOptions(workers=0), print)


def test_a_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "shoal" / "m.toml"
    measurements: list[CalibrationOptions] = []

    def once(options: CalibrationOptions, say: object) -> object:
        measurements.append(options)
        return MACHINE

    monkeypatch.setattr(measure, "calibrate", once)
    monkeypatch.setattr(measure, "cache_file", lambda device=None: file)
    first, second = (cluster_text(measure.calibrated_cluster()) for _ in range(2))
    assert first == second and len(measurements) == 1
    file.write_text("nodes = ")
    measure.calibrated_cluster()
    assert len(measurements) == 2


def test_a_verdict_says_whether_the_predicted_best_is_the_best() -> None:
    ddp = PredictedRun("ddp", 2, 1.0, 0.9, 1.1, 1.25, 1.2, 1.3)
    gossip = replace(ddp, strategy="gossip", predicted_s=1.2, measured_s=1.2)
    verdict = Verdict("mlp", (ddp, gossip))
    assert (verdict.picked, verdict.best) == (ddp, gossip)
    assert verdict.regret == pytest.approx(1.25 / 1.2 - 1)
    assert verdict.median_error == median_error([verdict, verdict]) == pytest.approx(0.1)
    assert verdict.to_json()["is_best_or_close"]


@pytest.mark.parametrize(("async_s", "request_s"), [(700e-6, 200e-6), (3e-3, 1.5e-3)])
def test_a_server_adds_what_a_tiny_step_takes_longer_with_it(
    async_s: float, request_s: float
) -> None:
    """Beside 500 us of the worker's own; where it takes longer, the server is never idle."""
    document = measured(2) | {"served": {"lockstep": around(800e-6), "async": around(async_s)}}
    device = machine_of([measured(1), document], 2, 8e9).device_of(2)
    assert device.served_step_s == pytest.approx(300e-6)
    assert device.request_s == pytest.approx(request_s)


def test_the_rate_of_pushes_is_the_one_that_gives_the_measured_cycle() -> None:
    """2 workers on 2 cores, which the server takes part of: 1 ns for each byte of a push."""
    pushes = []
    for size, rate in ((1 << 20, 1e9), (64 << 20, 0.5e9)):
        request_s = 200e-6 + size / rate
        away_s = 500e-6 + 1e-3 + 2 * request_s / 2
        cycle_s = queue_cycle_s(2, away_s, request_s)
        pushes.append({"bytes": size, "computed": around(1e-3), "async": around(cycle_s)})
    tiny = {"lockstep": around(800e-6), "async": around(700e-6)}
    document = measured(2) | {"served": {**tiny, "pushes": pushes}}
    cluster = machine_of([measured(1), document], 2, 8e9)
    device = parse_cluster(cluster_text(cluster), "m.toml", "m").device_of(2)
    assert device.served_bytes_per_s == pytest.approx(1e9)
    assert device.served_efficiency.at(1 << 20) == pytest.approx(1.0)
    assert device.served_efficiency.at(64 << 20) == pytest.approx(0.5)


def test_workers_that_computed_wait_longer_in_a_call_than_idle_ones() -> None:
    took = {"work": around(500e-6), "meet": around(600e-6), "hand over": around(520e-6)}
    device = machine_of([measured(1), measured(2) | {"handover": took}], 2, 8e9).device_of(2)
    assert device.meet_s == pytest.approx(90e-6)  # 100, with 10 of the call itself
    assert device.wait_s == pytest.approx(20e-6)
    assert MACHINE.device_of(2).meet_s == 0
