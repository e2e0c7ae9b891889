"""Figures that were measured on a machine take the place of closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.spread import SpreadPredictor
from shoal.cluster import Cluster, Node, Noise
from shoal.cluster.hardware import Device, LinkSpec, MeasuredCalls
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import Prediction
from shoal.plan.profile import ModelProfile, profiled
from shoal.plan.step.collective_time import RankGroup, collective_time
from shoal.plan.step.layer_time import KernelModel
from shoal.plan.step.stragglers import expected_max
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
    assert KernelModel(CORE, "fp32").time([kernel]).seconds == pytest.approx(1e-4 + 5e-6)
    gpu = replace(CORE, synchronous=False)
    assert KernelModel(gpu, "fp32").time([kernel]).seconds == pytest.approx(1e-4)
    slower = replace(CORE, backward_launch_s=2e-5)
    backward = KernelModel(slower, "fp32").time([kernel], backward=True)
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
    rate = SMALL_MODEL.model_flops(8) / prediction.step_s / workers
    assert prediction.mfu == pytest.approx(rate / peak)
    assert prediction.memory_limit_bytes == limit
    assert predicted(host(devices).with_memory(1e9)).memory_limit_bytes == 1e9


def test_what_flash_attention_skips_does_not_count_as_computed() -> None:
    """Of a long sequence nearly all operations are attention, half of which is masked."""
    long = transformer_named("layers=2,hidden=512,heads=8,vocab=100,sequence=131072,precision=fp32")
    settings = PlanSettings(8, flash_attention=True)
    prediction = Predictor(long, host(1)).predict(parse("ddp"), 8, settings)
    assert prediction.mfu is not None and 0.8 < prediction.mfu <= 1
