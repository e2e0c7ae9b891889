"""Figures that were measured on a machine take the place of closed forms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.predict import PredictedRun, Verdict, median_error
from benchmarks.spread import SpreadPredictor, at_quartile
from shoal.cluster import Cluster, Node, Noise
from shoal.cluster.hardware import Device, LinkSpec, MeasuredCalls
from shoal.cluster.toml_file import cluster_text, parse_cluster
from shoal.errors import BadInput
from shoal.observe.calibration import measure
from shoal.observe.calibration.device import machine_of
from shoal.observe.calibration.measure import worker_counts
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import Prediction
from shoal.plan.profile import ModelProfile, profiled
from shoal.plan.step.collective_time import RankGroup, collective_time
from shoal.plan.step.layer_time import KernelModel
from shoal.plan.step.stragglers import expected_max, queue_cycle_s
from shoal.plan.workloads import Kernel
from shoal.plan.workloads.model_presets import transformer_named
from shoal.strategy.strategy import as_strategy, parse
from tests.plan.test_search import MODEL, cluster

CORE = Device("core", 1e9, 1e10, {"fp32": 1e10}, launch_s=5e-6, synchronous=True)
CALLS = MeasuredCalls("shm", "all_reduce", "", 2, ((1e3, 1e-5), (1e6, 1e-3)))


def test_calls_are_linear_between_points_and_go_on_at_the_last_rate() -> None:
    assert CALLS.seconds(10) == 1e-5
    assert CALLS.seconds(1e6) == pytest.approx(1e-3)
    assert CALLS.seconds(500_500) == pytest.approx((1e-5 + 1e-3) / 2)
    assert CALLS.seconds(2e6) == pytest.approx(1e-3 + (1e-3 - 1e-5) / (1e6 - 1e3) * 1e6)


def test_measured_calls_inside_a_node_scale_with_the_ranks() -> None:
    node = Node(4, fabric=LinkSpec("shm", 1e9, 1e-6), measured=(CALLS,))
    cluster = Cluster("host", CORE, node)
    two = collective_time(cluster, "all_reduce", RankGroup(2, 1), 1e6)
    four = collective_time(cluster, "all_reduce", RankGroup(4, 1), 1e6)
    assert two.seconds == pytest.approx(1e-3)
    assert four.seconds == pytest.approx(1e-3 * 0.75 / 0.5)


def test_the_nearest_number_of_workers_decides_the_device() -> None:
    slow = replace(CORE, name="crowded")
    cluster = Cluster("host", CORE, Node(16, crowded=((1, CORE), (16, slow))))
    assert cluster.device_of(2) is CORE
    assert cluster.device_of(12) is slow
    assert Cluster("host", CORE, Node(16)).device_of(12) is CORE


def test_on_a_cpu_launches_add_to_kernels() -> None:
    kernel = Kernel("product", 1e6, 0.0, 100, 100, 50)
    assert KernelModel(CORE, "fp32").time((kernel,)).seconds == pytest.approx(1e-4 + 5e-6)
    gpu = replace(CORE, synchronous=False)
    assert KernelModel(gpu, "fp32").time((kernel,)).seconds == pytest.approx(1e-4)
    slower = replace(CORE, backward_launch_s=2e-5)
    backward = KernelModel(slower, "fp32").time((kernel,), backward=True)
    assert backward.launch_s == pytest.approx(2e-5)


SETTINGS = PlanSettings(8)
PASSES = ("forward", "backward", "update")


def predicted(hardware: object, text: str, workers: int) -> Prediction:
    return Predictor(MODEL, hardware).predict(as_strategy(text), workers, SETTINGS)  # type: ignore[arg-type]


def seconds(prediction: Prediction, name: str) -> float:
    return sum(part.seconds for part in prediction.parts if part.name == name)


def test_a_step_on_one_worker_takes_what_its_passes_took() -> None:
    passes = ModelProfile(1, 8, forward_s=0.25, backward_s=0.5, update_s=0.125)
    single = predicted(profiled(cluster(80), MODEL, [passes]), "single", 1)
    assert [seconds(single, name) for name in PASSES] == pytest.approx([0.25, 0.5, 0.125])


def test_a_profile_at_twice_the_predicted_time_doubles_every_split() -> None:
    hardware = cluster(80)
    plain = predicted(hardware, "single", 1)
    passes = ModelProfile(1, 8, *(2 * seconds(plain, name) for name in PASSES))
    paced = profiled(hardware, MODEL, [passes])
    for text in ("tp(2)", "ddp", "pp(2)"):
        before, after = (predicted(one, text, 2) for one in (hardware, paced))
        for name in PASSES[:2]:
            assert seconds(after, name) == pytest.approx(2 * seconds(before, name))


def test_quartiles_of_the_passes_are_the_spread() -> None:
    quartiles = {"forward_s": (0.2, 0.3), "backward_s": (0.4, 0.6), "update_s": (0.1, 0.2)}
    passes = ModelProfile(1, 8, 0.25, 0.5, 0.125, quartiles)
    paced = profiled(cluster(80), MODEL, [passes])
    found = SpreadPredictor(MODEL, paced).predict(as_strategy("single"), 1, SETTINGS)
    assert found.low_s == pytest.approx(found.step_s - 0.05 - 0.1 - 0.025)
    assert found.high_s == pytest.approx(found.step_s + 0.05 + 0.1 + 0.075)


def test_the_slowest_worker_of_a_profile_is_as_slow_in_the_price() -> None:
    passes = ModelProfile(4, 2, 0.25, 0.5, 0.125, slowest=1.2)
    noise = profiled(cluster(80), MODEL, [passes]).noise
    assert expected_max(noise, 4) == pytest.approx(1.2, rel=1e-3)


def test_calls_take_as_long_as_the_sum_of_gradients_did() -> None:
    calls = MeasuredCalls("shm", "all_reduce", "", 4, ((1e3, 1e-5), (1e9, 1.0)))
    hardware = cluster(80)
    hardware = replace(hardware, node=replace(hardware.node, devices=4, measured=(calls,)))
    passes = ModelProfile(4, 2, 0.25, 0.5, 0.125, gradients_s=3.0)
    paced = profiled(hardware, MODEL, [passes])
    (one, other) = (s for _, s in paced.node.measured[0].points)
    assert one / 1e-5 == pytest.approx(other / 1.0)
    again = profiled(paced, MODEL, [passes]).node.measured[0]
    assert again.points[0][1] == pytest.approx(one)


def test_a_device_behind_its_host_hides_waits_and_the_host() -> None:
    hardware = cluster(80)
    hardware = replace(hardware, device=replace(hardware.device, step_s=0.1))
    for host_s, step_s in ((0.5, 0.8), (0.75, 0.85)):
        passes = ModelProfile(1, 8, 0.25, 0.5, 0.25, whole_s=0.8, host_s=host_s)
        found = predicted(profiled(hardware, MODEL, [passes]), "single", 1)
        assert found.step_s == pytest.approx(step_s)


def test_workers_that_meet_in_every_layer_wait_more_often() -> None:
    core = replace(cluster(80).device, synchronous=True)
    host = replace(cluster(80), device=core, noise=Noise(jitter=0.05))
    in_layers, once = (seconds(predicted(host, text, 2), "stragglers") for text in ("tp(2)", "ddp"))
    assert in_layers > 2 * once > 0


ONE_CORE = Device("1 of 8 cores", 2e9, 10e9, {"fp32": 1e11}, synchronous=True)
ALL_CORES = replace(ONE_CORE, name="8 cores", memory_bytes=16e9, peak_flops={"fp32": 8e11})
SMALL_MODEL = transformer_named("layers=2,hidden=512,heads=8,sequence=256,precision=fp32")


def host(devices: int) -> Cluster:
    """A worker has all cores where it is alone on its host."""
    memory, nic = LinkSpec("memory", 20e9, 1e-6), LinkSpec("network", 1e9, 5e-6)
    node = Node(devices, memory, nic=nic, crowded=((1, ALL_CORES), (8, ONE_CORE)))
    return Cluster("host", ONE_CORE, node, nodes=8 // devices)


@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("devices", [1, 8])
def test_a_worker_that_has_all_cores_is_held_against_their_peak(workers: int, devices: int) -> None:
    def predicted(hardware: Cluster) -> Prediction:
        return Predictor(SMALL_MODEL, hardware).predict(parse("ddp"), workers, SETTINGS)

    prediction = predicted(host(devices))
    peak, limit = (8e11, 16e9) if 1 in (devices, workers) else (1e11, 2e9)
    assert prediction.mfu is not None and prediction.mfu <= 1
    rate = SMALL_MODEL.model_flops(8, True) / prediction.step_s / workers
    assert prediction.mfu == pytest.approx(rate / peak)
    assert prediction.memory_limit_bytes == limit
    assert predicted(host(devices).with_memory(1e9)).memory_limit_bytes == 1e9


def test_what_flash_attention_skips_does_not_count_as_computed() -> None:
    """Of a long sequence nearly all operations are attention, half of which is masked."""
    long = transformer_named("layers=2,hidden=512,heads=8,vocab=100,sequence=131072,precision=fp32")
    settings = PlanSettings(8, flash_attention=True)
    prediction = Predictor(long, host(1)).predict(parse("ddp"), 8, settings)
    assert prediction.mfu is not None and 0.8 < prediction.mfu <= 1


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


def test_a_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "shoal" / "m.toml"
    measurements: list[object] = []

    def once(*options: object, **named: object) -> object:
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
