"""A calibration ends when it has to: what it had no time for is counted, and named."""

from __future__ import annotations

import time
from collections import Counter

import torch

import shoal
from shoal.cluster.toml_file import cluster_text, parse_cluster
from shoal.observe.calibration.device import machine_of
from shoal.observe.calibration.kernels import BYTES, SHAPES, KernelBench
from shoal.observe.calibration.worker import measure


def bench(ends_s: float) -> KernelBench:
    found = KernelBench(torch.device("cpu"), lambda: None)
    found.ends_s = ends_s
    return found


def test_without_time_each_section_measures_one_and_counts_the_others() -> None:
    late = bench(time.perf_counter())
    products = late.products(0.0)["fp32"]
    assert [row["way"] for row in products] == ["forward", "input", "weight"]
    assert len(late.memory(0.0)) == 1 and not late.named(0.0)
    assert late.left_out == Counter(
        {
            "products in fp32": len(SHAPES) - 1,
            "memory": len(BYTES) - 1,
            "kernels by name": 7,
        }
    )


def test_what_takes_longer_than_is_left_is_not_begun() -> None:
    begun = bench(time.perf_counter() + 60.0)
    assert begun.has_time("blocks", 30.0) and not begun.left_out
    assert not begun.has_time("blocks", 90.0)
    assert begun.left_out == {"blocks": 1}


def test_a_machine_comes_of_what_there_was_time_for() -> None:
    found = shoal.run(lambda job: measure(job, 0.0))
    assert found["left_out"]["products in fp32"] == len(SHAPES) - 1
    cluster = machine_of([found], cores=1, memory_bytes=1e9)
    read = parse_cluster(cluster_text(cluster), "machine.toml", "machine")
    assert read.device.peak_flops["fp32"] > 0
