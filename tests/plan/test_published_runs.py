"""Predictions with presets as they are, against runs that papers describe; nothing is fitted.

DeepSpeed's pipelines and FSDP of 2022 are slower than what their kernels and links take: their
hosts wait between micro-batches and layers, which the presets do not know. The bounds say how far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pytest

from shoal.cluster.cluster import Cluster
from shoal.cluster.presets import load_cluster
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.step.collective_time import MEGATRON_ORDER
from shoal.plan.workloads.transformer_block import Transformer
from shoal.strategy.strategy import as_strategy
from tests.plan import published_runs as runs
from tests.plan.published_runs import PublishedRun


def cluster_of(run: PublishedRun) -> Cluster:
    cluster = load_cluster(run.preset)
    if run.nics is not None:
        count, gigabits = run.nics
        assert cluster.node.nic is not None
        nic = replace(cluster.node.nic, bytes_per_s=gigabits * 1e9 / 8)
        cluster = replace(cluster, node=replace(cluster.node, nics=count, nic=nic))
    return cluster.of_size(run.workers)


def error_of(run: PublishedRun) -> float:
    workload = Transformer(run.source, run.sizes, run.precision)
    settings = PlanSettings(
        run.batch,
        run.microbatch,
        run.recompute,
        run.flash_attention,
        run.overlap,
        even_stages=True,
        scatter_sends=run.scatter_sends,
    )
    # Megatron-LM and DeepSpeed reduce gradients as one buffer
    strategy = as_strategy(run.strategy.replace("ddp +", "ddp(bucket_mb=1000000) +"))
    predictor = Predictor(workload, cluster_of(run), MEGATRON_ORDER)
    return predictor.predict(strategy, run.workers, settings).step_s / run.measured_s - 1


@pytest.mark.parametrize(
    ("table", "most"),
    [
        (runs.PTD, 0.05),
        ((runs.KORTHIKANTI_DP8,), 0.04),
        (runs.MEGASCALE, 0.07),
        (runs.LLAMA, 0.12),
        (runs.MT_NLG, 0.22),
        ((runs.BLOOM_176B,), 0.15),
        ((runs.NEOX_20B,), 0.27),
        (runs.FSDP, 0.22),
    ],
    ids=["ptd", "korthikanti-dp8", "megascale", "llama-3", "mt-nlg", "bloom", "neox", "fsdp"],
)
def test_mean_error_of_a_published_table(table: Sequence[PublishedRun], most: float) -> None:
    assert fmean(abs(error_of(run)) for run in table) < most
