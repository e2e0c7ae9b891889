"""Predictions with presets as they are, against runs that papers describe; nothing is fitted.

DeepSpeed's pipelines and FSDP of 2022 are slower than what their kernels and links take: their
hosts wait between micro-batches and layers, which the presets do not know. The bounds say how far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.validation.compare import MEGATRON, RunsAs, validate
from benchmarks.validation.measured import MeasuredRow, TableDefaults, read_table
from shoal.cluster.cluster import Cluster
from shoal.cluster.presets import load_cluster
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import DeviceMemory
from shoal.plan.step.collective_time import MEGATRON_ORDER
from shoal.plan.workloads.transformer_block import Transformer, TransformerSizes
from shoal.plan.workloads.workload import Recompute
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


# Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC'21, table 1
MEGATRON_TABLE_1 = """\
params_b,heads,hidden,layers,tp,pp,dp,gpus,batch,tflops_per_gpu
1.7,24,2304,24,1,1,32,32,512,137
3.6,32,3072,30,2,1,32,64,512,138
7.5,32,4096,36,4,1,32,128,512,142
18.4,48,6144,40,8,1,32,256,1024,135
39.1,64,8192,48,8,2,32,512,1536,138
76.1,80,10240,60,8,4,32,1024,1792,140
145.6,96,12288,80,8,8,24,1536,2304,148
310.1,128,16384,96,8,16,15,1920,2160,155
529.6,128,20480,105,8,35,9,2520,2520,163
1008.0,160,25600,128,8,64,6,3072,3072,163
"""
# Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", table 5
KORTHIKANTI_TABLE_5 = """\
model,heads,hidden,layers,tp,pp,interleave,gpus,global_batch,micro_batch,full_recompute_s,seqpar_selective_s
22B,64,6144,48,8,1,1,8,4,4,1.42,1.10
175B,96,12288,96,8,8,3,64,64,1,18.13,13.75
530B,128,20480,105,8,35,3,280,280,1,49.05,37.83
1T,160,25600,128,8,64,1,512,512,1,94.42,71.49
"""
# the same, figures 1 and 7, in GiB: parameters with optimizer, activations without recompute,
# activations with sequence parallelism and selective recompute
KORTHIKANTI_MEMORY = {
    22: (45.5625, 59.25, 9.5625),
    175: (45.5625, 66.84375, 12.3515625),
    530: (31.640625, 114.0234375, 23.076171875),
    1000: (32.958984375, 131.25, 26.5625),
}
SIZES = {
    22: (TransformerSizes(48, 6144, 64), 1, 1, 8, 4, 4),
    175: (TransformerSizes(96, 12288, 96), 8, 3, 64, 64, 1),
    530: (TransformerSizes(105, 20480, 128), 35, 3, 280, 280, 1),
    1000: (TransformerSizes(128, 25600, 160), 64, 1, 512, 512, 1),
}
GIB = 2**30


def rows_of(folder: Path, table: str) -> list[MeasuredRow]:
    file = folder / "table.csv"
    file.write_text(table)
    return read_table(file, TableDefaults())


def test_megatron_table_1_within_10_percent(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, MEGATRON_TABLE_1)
    assert validate(rows, load_cluster("dgx-a100"), RunsAs()).mean_absolute_error < 0.1


def test_korthikanti_table_5_within_6_percent(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, KORTHIKANTI_TABLE_5)
    found = validate(rows, load_cluster("dgx-a100"), RunsAs())
    assert len(found.rows) == 8
    for recompute in ("full", "selective"):
        kept = [
            one for row, one in zip(rows, found.rows, strict=True) if row.recompute == recompute
        ]
        assert fmean(abs(one.error) for one in kept) < 0.06


def memory_of(model: int, recompute: Recompute, sequence_parallel: bool) -> DeviceMemory:
    sizes, stages, chunks, workers, batch, microbatch = SIZES[model]
    tp = "tp(8, sequence=True)" if sequence_parallel else "tp(8)"
    shape = f', schedule="interleaved", chunks={chunks}' if chunks > 1 else ""
    strategy = as_strategy(tp if stages == 1 else f"{tp} + pp({stages}{shape})")
    predictor = Predictor(
        Transformer("gpt", sizes, MEGATRON), load_cluster("dgx-a100").of_size(workers)
    )
    settings = PlanSettings(batch, microbatch, recompute, even_stages=True)
    return predictor.predict(strategy, workers, settings).memory


@pytest.mark.parametrize("model", list(SIZES))
def test_activations_are_those_of_korthikanti(model: int) -> None:
    _, whole, little = KORTHIKANTI_MEMORY[model]
    assert memory_of(model, "none", False).activations / GIB == pytest.approx(whole, rel=0.05)
    assert memory_of(model, "selective", True).activations / GIB == pytest.approx(little, rel=0.05)


def test_weights_and_optimizer_are_18_bytes_a_parameter() -> None:
    """The figures leave out embeddings, which the fullest device has."""
    errors = []
    for model, (weights, _, activations) in KORTHIKANTI_MEMORY.items():
        memory = memory_of(model, "selective", True)
        held = memory.parameters + memory.gradients + memory.optimizer
        errors.append((held + memory.activations) / GIB / (weights + activations) - 1)
        sizes, stages, *_ = SIZES[model]
        embedding = (sizes.vocab / 8 + sizes.sequence) * sizes.hidden
        assert (held - 18 * embedding) / GIB == pytest.approx(weights, rel=0.01), stages
    assert fmean(map(abs, errors)) < 0.05
