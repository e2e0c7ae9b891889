"""Predictions with presets as they are, against runs that papers describe; nothing is fitted.

DeepSpeed's pipelines and FSDP of 2022 are slower than what their kernels and links take: their
hosts wait between micro-batches and layers, which the presets do not know. The bounds say how far.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.validation.compare import MEGATRON, RunsAs, validate
from benchmarks.validation.measured import MeasuredRow, TableDefaults, read_table
from shoal.cluster.presets import load_cluster
from shoal.errors import BadInput
from shoal.plan.predict import PlanSettings, Predictor
from shoal.plan.prediction import DeviceMemory
from shoal.plan.step.collective_time import MEGATRON_ORDER
from shoal.plan.workloads import Precision, Recompute, parameters_of
from shoal.plan.workloads.model_presets import PRESETS, is_transformer, transformer_named
from shoal.plan.workloads.transformer_block import Transformer, TransformerSizes
from shoal.strategy.strategy import as_strategy

GPT = TransformerSizes(96, 12288, 96)
LLAMA = transformer_named("llama-3.1-405b").sizes
MODELS = {
    "175B": GPT,
    "175B, no dropout": replace(GPT, dropout=False),
    "530B": TransformerSizes(105, 20480, 128),
    "BLOOM": TransformerSizes(70, 14336, 112, vocab=250880),
    "NeoX": TransformerSizes(44, 6144, 64, vocab=50432, tied=False),
    "405B": LLAMA,
    "405B, 128k": replace(LLAMA, sequence=131072),
}
# Speed is seconds of a step, TFLOP/s a GPU as Narayanan et al. count them (with recompute), or the
# MFU. What a source does not say is noted: micro-batches of 1 where memory allows no more.
RUNS = """\
ptd      | 175B             | ddp + tp(8) + pp(12)     | 384   | 1536 | 1 | full      | 153 TFLOP/s
ptd      | 175B             | ddp + tp(8) + pp(12)     | 768   | 1536 | 1 | full      | 149 TFLOP/s
ptd      | 175B             | ddp + tp(8) + pp(12)     | 1536  | 1536 | 1 | full      | 141 TFLOP/s
ptd      | 530B             | ddp + tp(8) + pp(35 * 3) | 560   | 2240 | 1 | full      | 171 TFLOP/s
ptd      | 530B             | ddp + tp(8) + pp(35 * 3) | 1120  | 2240 | 1 | full      | 167 TFLOP/s
ptd      | 530B             | ddp + tp(8) + pp(35 * 3) | 2240  | 2240 | 1 | full      | 159 TFLOP/s
dp8      | 530B             | ddp + sp(8) + pp(35 * 3) | 2240  | 2240 | 1 | selective | 39.15 s
megascale| 175B, no dropout | ddp + sp(8) + pp(8 * 6)  | 256   | 768  | 1 | selective | 0.530 MFU
megascale| 175B, no dropout | ddp + sp(8) + pp(8 * 6)  | 512   | 768  | 1 | selective | 0.499 MFU
megascale| 175B, no dropout | ddp + sp(8) + pp(8 * 6)  | 768   | 768  | 1 | selective | 0.467 MFU
megascale| 175B, no dropout | ddp + sp(8) + pp(8 * 6)  | 1024  | 768  | 1 | selective | 0.447 MFU
megascale| 175B, no dropout | ddp + sp(8) + pp(8 * 6)  | 3072  | 6144 | 1 | selective | 0.487 MFU
megascale| 175B, no dropout | ddp + sp(8) + pp(8 * 6)  | 6144  | 6144 | 1 | selective | 0.478 MFU
megascale| 175B, no dropout | ddp + sp(8) + pp(8 * 6)  | 8192  | 6144 | 1 | selective | 0.433 MFU
megascale| 175B, no dropout | ddp + sp(8) + pp(8 * 6)  | 12288 | 6144 | 1 | selective | 0.412 MFU
llama    | 405B       | layers + sp(8) + pp(16 * 8)          | 8192  | 2048 | 1 | none | 0.43 MFU
llama    | 405B       | layers + sp(8) + pp(16 * 8)          | 16384 | 2048 | 1 | none | 0.41 MFU
llama    | 405B, 128k | layers + sp(8) + cp(16) + pp(16 * 8) | 16384 | 128  | 1 | none | 0.38 MFU
mt-nlg   | 530B             | ddp + tp(8) + pp(35)     | 2240  | 1920 | 1 | full      | 60.1 s
mt-nlg   | 530B             | ddp + tp(8) + pp(35)     | 2800  | 1920 | 1 | full      | 50.2 s
mt-nlg   | 530B             | ddp + tp(8) + pp(35)     | 3360  | 1920 | 1 | full      | 44.4 s
bloom    | BLOOM            | zero(1) + tp(4) + pp(12) | 384   | 2048 | 2 | full      | 150 TFLOP/s
neox     | NeoX             | zero(1) + tp(2) + pp(4)  | 96    | 1536 | 4 | full      | 117 TFLOP/s
fsdp     | 175B, no dropout | zero(3)                  | 128   | 128  | 1 | full      | 173 TFLOP/s
fsdp     | 175B, no dropout | zero(3)                  | 128   | 256  | 2 | full      | 186 TFLOP/s
"""
BF16 = Precision("bf16", 2, 4, 4, 8)
WHOLE_SENDS = {"scatter_sends": False}  # DeepSpeed's pipeline sends whole activations
# by table: the mean error at most, and what is not as Megatron-LM on a DGX A100 has it
TABLES: dict[str, tuple[float, dict[str, Any]]] = {
    "ptd": (0.05, {}),  # Narayanan et al., SC'21, table 2: PTD-P
    "dp8": (0.04, {}),  # Korthikanti et al. 2022, section 6.3: 8 replicas of the 530B model
    # Jiang et al., NSDI 2024, table 2: the rows of Megatron-LM; 8 x 8, 6 chunks
    "megascale": (0.07, {"precision": BF16}),
    # Dubey et al., "The Llama 3 Herd of Models", table 4. Its FSDP keeps parameters after forward,
    # scatters gradients and gathers parameters by layers: in time, ddp with buckets of a layer
    "llama": (0.12, {"precision": BF16, "overlap": True, "flash_attention": True}),
    # Smith et al., "Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B", section 2.4
    "mt-nlg": (0.22, WHOLE_SENDS),
    # BigScience, BLOOM's training log and paper: 48 nodes with 4 Omni-Path links of 100 Gb/s each
    "bloom": (0.15, {"precision": BF16, "nics": (4, 100), **WHOLE_SENDS}),
    # Black et al., section 2.3 and table of its configuration: two HDR links a node
    "neox": (0.27, {"nics": (2, 200), **WHOLE_SENDS}),
    # Zhao et al., "PyTorch FSDP", section 5.4; gradients are sent in bf16
    "fsdp": (0.22, {"precision": Precision("bf16", 2, 2, 4, 8), "overlap": True}),
}


def operations(sizes: TransformerSizes, batch: int, of_layer: int) -> float:
    """Narayanan et al., SC'21, equation 3; 72 in place of 96: without recompute."""
    s, h, layers = sizes.sequence, sizes.hidden, sizes.layers
    more = 1 + s / (6 * h) + 6 * sizes.vocab / (of_layer * layers * h)
    return of_layer * batch * s * layers * h**2 * more


def llama_operations(sizes: TransformerSizes, batch: int) -> float:
    """Causal attention is counted once."""
    per_layer = 2 * sizes.hidden * (sizes.hidden + sizes.key_heads * sizes.head_size)
    per_layer += 3 * sizes.hidden * sizes.inner
    weights = sizes.layers * per_layer + sizes.vocab * sizes.hidden
    attention = 6 * sizes.layers * sizes.hidden * sizes.sequence
    return batch * sizes.sequence * (6.0 * weights + attention)


def seconds_of(speed: str, sizes: TransformerSizes, batch: int, workers: int) -> float:
    number, unit = speed.split()
    if unit == "s":
        return float(number)
    if unit == "TFLOP/s":
        return operations(sizes, batch, 96) / (workers * float(number) * 1e12)
    peak, counted = 312e12, operations(sizes, batch, 72)
    if sizes.gated:
        peak, counted = 989e12, llama_operations(sizes, batch)
    return counted / (workers * float(number) * peak)


def error_of(row: str) -> float:
    table, model, text, *numbers, recompute, speed = (cell.strip() for cell in row.split("|"))
    workers, batch, microbatch = map(int, numbers)
    megatron = {"precision": MEGATRON, "overlap": False, "scatter_sends": True, "nics": None}
    said = megatron | TABLES[table][1]
    precision, nics = said.pop("precision"), said.pop("nics")
    cluster = load_cluster("dgx-h100" if table == "llama" else "dgx-a100")
    if nics is not None:
        nic = replace(cluster.node.nic, bytes_per_s=nics[1] * 1e9 / 8)  # type: ignore[type-var]
        cluster = replace(cluster, node=replace(cluster.node, nics=nics[0], nic=nic))
    text = re.sub(r"pp\((\d+) \* (\d+)\)", r'pp(\1, schedule="interleaved", chunks=\2)', text)
    text = text.replace("sp(8)", "tp(8, sequence=True)").replace("layers", "ddp(bucket_mb=400)")
    # Megatron-LM and DeepSpeed reduce gradients as one buffer
    strategy = as_strategy(text.replace("ddp +", "ddp(bucket_mb=1000000) +"))
    model_sizes = MODELS[model]
    workload = Transformer(model, model_sizes, precision)
    predictor = Predictor(workload, cluster.of_size(workers), MEGATRON_ORDER)
    settings = PlanSettings(batch, microbatch, recompute, even_stages=True, **said)  # type: ignore[arg-type]
    predicted_s = predictor.predict(strategy, workers, settings).step_s
    return predicted_s / seconds_of(speed, model_sizes, batch, workers) - 1


@pytest.mark.parametrize("table", TABLES)
def test_mean_error_of_a_published_table(table: str) -> None:
    errors = [error_of(row) for row in RUNS.splitlines() if row.startswith(table)]
    assert fmean(map(abs, errors)) < TABLES[table][0]


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
# activations with sequence parallelism and selective recompute; with the sizes of each model,
# stages, chunks, workers, batch and micro-batch
KORTHIKANTI_MEMORY = {
    22: ((45.5625, 59.25, 9.5625), TransformerSizes(48, 6144, 64), 1, 1, 8, 4, 4),
    175: ((45.5625, 66.84375, 12.3515625), GPT, 8, 3, 64, 64, 1),
    530: ((31.640625, 114.0234375, 23.076171875), MODELS["530B"], 35, 3, 280, 280, 1),
    1000: ((32.958984375, 131.25, 26.5625), TransformerSizes(128, 25600, 160), 64, 1, 512, 512, 1),
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
    _, sizes, stages, chunks, workers, batch, microbatch = KORTHIKANTI_MEMORY[model]
    tp = "tp(8, sequence=True)" if sequence_parallel else "tp(8)"
    shape = f', schedule="interleaved", chunks={chunks}' if chunks > 1 else ""
    strategy = as_strategy(tp if stages == 1 else f"{tp} + pp({stages}{shape})")
    predictor = Predictor(
        Transformer("gpt", sizes, MEGATRON), load_cluster("dgx-a100").of_size(workers)
    )
    settings = PlanSettings(batch, microbatch, recompute, even_stages=True)
    return predictor.predict(strategy, workers, settings).memory


@pytest.mark.parametrize("model", KORTHIKANTI_MEMORY)
def test_activations_are_those_of_korthikanti(model: int) -> None:
    _, whole, little = KORTHIKANTI_MEMORY[model][0]
    assert memory_of(model, "none", False).activations / GIB == pytest.approx(whole, rel=0.05)
    assert memory_of(model, "selective", True).activations / GIB == pytest.approx(little, rel=0.05)


def test_weights_and_optimizer_are_18_bytes_a_parameter() -> None:
    """The figures leave out embeddings, which the fullest device has."""
    errors = []
    for model, ((weights, _, activations), sizes, stages, *_) in KORTHIKANTI_MEMORY.items():
        memory = memory_of(model, "selective", True)
        held = memory.parameters + memory.gradients + memory.optimizer
        errors.append((held + memory.activations) / GIB / (weights + activations) - 1)
        embedding = (sizes.vocab / 8 + sizes.sequence) * sizes.hidden
        assert (held - 18 * embedding) / GIB == pytest.approx(weights, rel=0.01), stages
    assert fmean(map(abs, errors)) < 0.05


# GPT-2: sizes of the released weights; GPT-3: table 2.1 of its paper, 174.6 billion in its
# appendix D; BERT without its pooler; others: the number of weights of the published checkpoints
PARAMETERS = """\
gpt-2 124.44e6          gpt-2-xl 1557.6e6       gpt-3 174.6e9           GPT_3-175B 174.6e9
gpt-3-13b 12.85e9       llama-2-7b 6.738e9      llama-2-13b 13.016e9    llama-2-70b 68.98e9
llama-3-8b 8.030e9      llama3-70b 70.554e9     llama-3.1-405b 405.85e9 llama-3-405b 405.85e9
llama-3.2-1b 1.236e9    llama-3.2-3b 3.213e9    mistral-7b 7.242e9      mistral-large 122.61e9
mixtral-8x7b 46.70e9    mixtral-8x22b 140.6e9   qwen-2.5-0.5b 494e6     qwen-2.5-7b 7.616e9
qwen2.5-72b 72.706e9    bert-large 334.09e6     vit-l 304.33e6          vit-h 632.05e6
"""


@pytest.mark.parametrize(("name", "number"), re.findall(r"(\S+) (\S+)", PARAMETERS))
def test_a_model_has_its_published_number_of_parameters(name: str, number: str) -> None:
    assert parameters_of(transformer_named(name)) == pytest.approx(float(number), rel=0.003)


def test_sizes_give_the_same_as_the_name_which_can_be_changed() -> None:
    sizes = "layers=96, hidden=12288, heads=96, vocab=50257, sequence=2048"
    assert transformer_named(sizes).sizes == transformer_named("gpt-3").sizes
    assert transformer_named("layers=2,hidden=8,heads=2,tied=no").sizes.tied is False
    model = transformer_named("llama-3-70b,seq=4096,precision=fp16")
    assert (model.sizes.sequence, model.precision.compute) == (4096, "fp16")
    assert transformer_named("llama-3-70b").precision.compute == "bf16"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpt-33", "there is no transformer 'gpt-33'; did you mean 'gpt-3'"),
        ("train.py", "there is no transformer 'train.py'; known are gpt-2, "),
        ("layers=96,hidden=12288", "lack heads"),
        ("layers=96,hidden", "'hidden' of 'layers=96,hidden' is not key=value, such as layers=96"),
        ("layers=x,hidden=8,heads=2", "layers=x of .* is not a whole number above 0"),
        ("layers=2,hidden=10,heads=4", "heads=4 must divide hidden=10"),
        ("layers=2,layers=3", "says layers twice"),
        ("gpt-3,hiden=5", "a transformer has no 'hiden' .*; did you mean 'hidden'"),
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
