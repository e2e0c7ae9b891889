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
from shoal.cluster import Cluster
from shoal.cluster.presets import load_cluster
from shoal.errors import BadInput
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import DeviceMemory
from shoal.plan.step.collective_time import MEGATRON_ORDER
from shoal.plan.workloads import Recompute, Split
from shoal.plan.workloads.model_presets import PRESETS, is_transformer, transformer_named
from shoal.plan.workloads.transformer_block import Transformer, TransformerSizes
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


def parameters(text: str) -> float:
    model = transformer_named(text)
    return sum(run.count * model.cost(i, Split()).parameters for i, run in enumerate(model.runs))


# GPT-2: sizes of the released weights; GPT-3: table 2.1 of its paper, 174.6 billion in its
# appendix D; others: the number of weights of the published checkpoints
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt-2", 124.44e6),
        ("gpt-2-xl", 1557.6e6),
        ("gpt-3", 174.6e9),
        ("GPT-3 175B", 174.6e9),
        ("gpt-3-13b", 12.85e9),
        ("llama-2-7b", 6.738e9),
        ("llama-2-13b", 13.016e9),
        ("llama-2-70b", 68.98e9),
        ("llama-3-8b", 8.030e9),
        ("llama3-70b", 70.554e9),
        ("llama-3.1-405b", 405.85e9),
        ("mistral-7b", 7.242e9),
        ("mixtral-8x7b", 46.70e9),
        ("mixtral-8x22b", 140.6e9),
        ("llama-3-405b", 405.85e9),
        ("llama-3.2-1b", 1.236e9),
        ("llama-3.2-3b", 3.213e9),
        ("qwen-2.5-0.5b", 494e6),
        ("qwen-2.5-7b", 7.616e9),
        ("qwen2.5-72b", 72.706e9),
        ("mistral-large", 122.61e9),
        ("bert-large", 334.09e6),  # without its pooler
        ("vit-l", 304.33e6),
        ("vit-h", 632.05e6),
    ],
)
def test_a_model_has_its_published_number_of_parameters(name: str, published: float) -> None:
    assert parameters(name) == pytest.approx(published, rel=0.003)


def test_sizes_give_the_same_as_the_name() -> None:
    sizes = "layers=96, hidden=12288, heads=96, vocab=50257, sequence=2048"
    assert transformer_named(sizes).sizes == transformer_named("gpt-3").sizes
    assert transformer_named("layers=2,hidden=8,heads=2,tied=no").sizes.tied is False


def test_a_name_can_be_changed() -> None:
    model = transformer_named("llama-3-70b,seq=4096,precision=fp16")
    assert (model.sizes.sequence, model.precision.compute) == (4096, "fp16")
    assert transformer_named("llama-3-70b").precision.compute == "bf16"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpt-33", "there is no transformer 'gpt-33'; did you mean gpt-3?"),
        ("train.py", "there is no transformer 'train.py'; there are gpt-2, "),
        ("layers=96,hidden=12288", "lack heads"),
        ("layers=96,hidden", "'hidden' of 'layers=96,hidden' is not key=value, such as layers=96"),
        ("layers=x,hidden=8,heads=2", "layers=x of .* is not a whole number above 0"),
        ("layers=2,hidden=10,heads=4", "heads=4 must divide hidden=10"),
        ("layers=2,layers=3", "says layers twice"),
        ("gpt-3,hiden=5", "a transformer has no 'hiden' .*; it has hidden"),
        ("gpt-3,gated=maybe", "gated=maybe of 'gpt-3,gated=maybe' is none of true, yes, 1"),
        ("gpt-3,precision=fp7", "precision=fp7 of .* is none of fp16, bf16, fp32, tf32"),
        ("", "there is no transformer ''"),
    ],
)
def test_a_mistake_is_named(text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        transformer_named(text)


def test_scripts_are_no_transformers() -> None:
    assert not is_transformer("train.py") and not is_transformer("gpt")
    assert all(is_transformer(name) for name in PRESETS)
    assert is_transformer("layers=2,hidden=8,heads=2")
