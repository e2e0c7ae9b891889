"""The MFU is held against the peak of the device that each worker really has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.cluster.cluster import Cluster, Node
from shoal.cluster.hardware import Device, LinkSpec
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.workloads.model_presets import transformer_named
from shoal.strategy.strategy import parse

CORE = Device("1 of 8 cores", 2e9, 10e9, {"fp32": 1e11}, synchronous=True)
ALL = replace(CORE, name="8 cores", memory_bytes=16e9, peak_flops={"fp32": 8e11})
MODEL = transformer_named("layers=2,hidden=512,heads=8,vocab=1000,sequence=256,precision=fp32")


def host(devices: int = 8) -> Cluster:
    """A worker has all cores where it is alone on its host."""
    memory = LinkSpec("memory", 20e9, 1e-6)
    node = Node(devices, memory, nic=LinkSpec("network", 1e9, 5e-6), crowded=((1, ALL), (8, CORE)))
    return Cluster("host", CORE, node, nodes=8 // devices)


@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("devices", [1, 8])
def test_a_worker_that_has_all_cores_is_held_against_their_peak(workers: int, devices: int) -> None:
    settings = PlanSettings(8)
    prediction = Predictor(MODEL, host(devices)).predict(parse("ddp"), workers, settings)
    peak = 8e11 if devices == 1 or workers == 1 else 1e11
    limit = 16e9 if devices == 1 or workers == 1 else 2e9
    assert prediction.mfu is not None and prediction.mfu <= 1
    rate = MODEL.model_flops(8) / prediction.step_s / workers
    assert prediction.mfu == pytest.approx(rate / peak)
    assert prediction.memory_limit_bytes == limit


def test_a_limit_of_memory_is_that_of_every_worker() -> None:
    limited = host().with_memory(1e9)
    for workers in (1, 8):
        prediction = Predictor(MODEL, limited).predict(parse("ddp"), workers, PlanSettings(8))
        assert prediction.memory_limit_bytes == 1e9


def test_what_flash_attention_skips_does_not_count_as_computed() -> None:
    """Of a long sequence nearly all operations are attention, half of which is masked."""
    long = transformer_named("layers=2,hidden=512,heads=8,vocab=100,sequence=131072,precision=fp32")
    settings = PlanSettings(8, flash_attention=True)
    prediction = Predictor(long, host(1)).predict(parse("ddp"), 8, settings)
    assert prediction.mfu is not None and 0.8 < prediction.mfu <= 1
