"""Steps of transformers that papers and repositories publish, table by table.

A row: model | strategy | GPUs | batch | micro-batch | recompute | speed. Speed is seconds of a
step, TFLOP/s a GPU as Narayanan et al. count them (with recompute), or the MFU. What a source does
not say is noted. No row of a table is left out, but those of sequences above 8,192 of MPT.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from benchmarks.validation.compare import POINTWISE, RunsAs
from benchmarks.validation.measured import (
    MeasuredRow,
    TableDefaults,
    TimedRow,
    operations,
    read_rows,
    read_table,
)
from shoal.plan.workloads import Precision, Recompute
from shoal.plan.workloads.model_presets import transformer_named
from shoal.plan.workloads.transformer_block import TransformerSizes

FP16 = Precision("fp16", 2, 2, 4, 8)
BF16 = Precision("bf16", 2, 4, 4, 8)
PURE_BF16 = Precision("bf16", 2, 2, 4, 8)  # gradients are sent in bf16
GPT = TransformerSizes(96, 12288, 96)
MEGASCALE = TransformerSizes(96, 12288, 128, vocab=64000, dropout=False)
LLAMA = transformer_named("llama-3.1-405b").sizes
MODELS = {
    "175B": GPT,
    "175B, no dropout": replace(GPT, dropout=False),
    "MegaScale": MEGASCALE,
    "MegaScale, parallel": replace(MEGASCALE, parallel=True),
    "530B": TransformerSizes(105, 20480, 128),
    "BLOOM": TransformerSizes(70, 14336, 112, vocab=250880),
    "NeoX": replace(
        TransformerSizes(44, 6144, 64, vocab=50432, tied=False, dropout=False),
        learned_positions=False,
        parallel=True,
    ),
    "405B": LLAMA,
    "405B, 128k": replace(LLAMA, sequence=131072),
}
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
RUNS = """\
ptd      | 175B             | ddp + tp(8) + pp(12)     | 384   | 1536 | 1 | full      | 153 TFLOP/s
ptd      | 175B             | ddp + tp(8) + pp(12)     | 768   | 1536 | 1 | full      | 149 TFLOP/s
ptd      | 175B             | ddp + tp(8) + pp(12)     | 1536  | 1536 | 1 | full      | 141 TFLOP/s
ptd      | 530B             | ddp + tp(8) + pp(35 * 3) | 560   | 2240 | 1 | full      | 171 TFLOP/s
ptd      | 530B             | ddp + tp(8) + pp(35 * 3) | 1120  | 2240 | 1 | full      | 167 TFLOP/s
ptd      | 530B             | ddp + tp(8) + pp(35 * 3) | 2240  | 2240 | 1 | full      | 159 TFLOP/s
zero-3   | 175B             | zero(3)                  | 384   | 1536 | 4 | full      | 144 TFLOP/s
zero-3   | 175B             | zero(3)                  | 768   | 1536 | 2 | full      | 88 TFLOP/s
zero-3   | 175B             | zero(3)                  | 1536  | 1536 | 1 | full      | 44 TFLOP/s
zero-3   | 530B             | zero(3)                  | 640   | 2560 | 4 | full      | 138 TFLOP/s
zero-3   | 530B             | zero(3)                  | 1120  | 2240 | 2 | full      | 98 TFLOP/s
zero-3   | 530B             | zero(3)                  | 2240  | 2240 | 1 | full      | 48 TFLOP/s
dp8      | 530B             | ddp + sp(8) + pp(35 * 3) | 2240  | 2240 | 1 | selective | 39.15 s
megascale| MegaScale        | ddp + sp(8) + pp(8 * 6)  | 256   | 768  | 1 | selective | 40.0 s
megascale| MegaScale        | ddp + sp(8) + pp(8 * 6)  | 512   | 768  | 1 | selective | 21.2 s
megascale| MegaScale        | ddp + sp(8) + pp(8 * 6)  | 768   | 768  | 1 | selective | 15.2 s
megascale| MegaScale        | ddp + sp(8) + pp(8 * 6)  | 1024  | 768  | 1 | selective | 11.9 s
megascale| MegaScale        | ddp + sp(8) + pp(8 * 6)  | 3072  | 6144 | 1 | selective | 29.02 s
megascale| MegaScale        | ddp + sp(8) + pp(8 * 6)  | 6144  | 6144 | 1 | selective | 14.78 s
megascale| MegaScale        | ddp + sp(8) + pp(8 * 6)  | 8192  | 6144 | 1 | selective | 12.24 s
megascale| MegaScale        | ddp + sp(8) + pp(8 * 6)  | 12288 | 6144 | 1 | selective | 8.57 s
megascale own | MegaScale, parallel | ddp + sp(8) + pp(8 * 6) | 256 | 768 | 1 | none | 32.0 s
megascale own | MegaScale, parallel | ddp + sp(8) + pp(8 * 6) | 512 | 768 | 1 | none | 16.5 s
megascale own | MegaScale, parallel | ddp + sp(8) + pp(8 * 6) | 768 | 768 | 1 | none | 11.5 s
megascale own | MegaScale, parallel | ddp + sp(8) + pp(8 * 6) | 1024 | 768 | 1 | none | 8.9 s
megascale own | MegaScale, parallel | ddp + sp(8) + pp(8 * 6) | 3072 | 6144 | 1 | none | 23.66 s
megascale own | MegaScale, parallel | ddp + sp(8) + pp(8 * 6) | 6144 | 6144 | 1 | none | 12.21 s
megascale own | MegaScale, parallel | ddp + sp(8) + pp(8 * 6) | 8192 | 6144 | 1 | none | 9.56 s
megascale own | MegaScale, parallel | ddp + sp(8) + pp(8 * 6) | 12288 | 6144 | 1 | none | 6.34 s
llama    | 405B       | layers + sp(8) + pp(16 * 8)          | 8192  | 2048 | 1 | none | 0.43 MFU
llama    | 405B       | layers + sp(8) + pp(16 * 8)          | 16384 | 2048 | 1 | none | 0.41 MFU
llama    | 405B, 128k | layers + sp(8) + cp(16) + pp(16 * 8) | 16384 | 128  | 1 | none | 0.38 MFU
mt-nlg   | 530B             | ddp + tp(8) + pp(35)     | 2240  | 1920 | 1 | full      | 60.1 s
mt-nlg   | 530B             | ddp + tp(8) + pp(35)     | 2800  | 1920 | 1 | full      | 50.2 s
mt-nlg   | 530B             | ddp + tp(8) + pp(35)     | 3360  | 1920 | 1 | full      | 44.4 s
bloom    | BLOOM            | zero(1) + tp(4) + pp(12) | 384   | 2048 | 2 | full      | 150 TFLOP/s
neox     | NeoX             | zero(1) + tp(2) + pp(4)  | 96    | 1536 | 4 | full      | 43.84 s
fsdp     | 175B, no dropout | zero(3)                  | 128   | 128  | 1 | full      | 173 TFLOP/s
fsdp     | 175B, no dropout | zero(3)                  | 128   | 256  | 2 | full      | 186 TFLOP/s
"""
# Qi et al., "Zero Bubble Pipeline Parallelism", tables 3 and 5: milliseconds of F, B and W of a
# stage, and the bubble of 1f1b: a step is m (F + B + W) / (1 - bubble). Its scripts have flash
# attention
ZERO_BUBBLE = """\
22 2304 24 | 8  | 6 | 24  | 18.522 18.086 9.337 | 0.2431
22 2304 24 | 8  | 6 | 32  | 18.513 18.086 9.331 | 0.1985
22 2304 24 | 8  | 6 | 64  | 18.546 18.097 9.321 | 0.1240
30 4096 32 | 8  | 3 | 24  | 29.718 29.444 19.927 | 0.2347
30 4096 32 | 8  | 3 | 32  | 29.802 29.428 19.530 | 0.1898
30 4096 32 | 8  | 3 | 64  | 29.935 29.621 19.388 | 0.1091
46 5120 40 | 16 | 1 | 48  | 11.347 11.248 8.132 | 0.2552
46 5120 40 | 16 | 1 | 64  | 11.307 11.254 8.101 | 0.2082
46 5120 40 | 16 | 1 | 128 | 11.325 11.308 8.109 | 0.1251
62 6144 48 | 32 | 1 | 96  | 10.419 10.207 7.715 | 0.2646
62 6144 48 | 32 | 1 | 128 | 10.408 10.204 7.703 | 0.2168
"""
A100_40 = 1555  # GB/s of the A100 with 40 GB; those with 80 GB have 2,039
_MEGATRON_LM = RunsAs()
# its default until 2021; gradients of 2022 are fp32, which products add to (Korthikanti et al.)
_MEGATRON_2021 = RunsAs(precision=FP16, fused_adding=False)
# DeepSpeed's pipelines send whole activations, and neighbours first one way, then the other
# (runtime/pipe/schedule.py)
DEEPSPEED = RunsAs(scatter_sends=False, fused_adding=False, sends_in_turn=True)
_FSDP = RunsAs(overlap=True, precision=PURE_BF16, flash_attention=True, eager=POINTWISE)
_MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}


PROJECTS = {  # with more tables than one
    "Megatron-LM": ("sc21 table 1", "ptd", "zero-3", "korthikanti", "dp8"),
    "MegaScale": ("megascale", "megascale own"),
    "MPT": ("mpt a100", "mpt a100-40", "mpt h100"),
    "vTrain": ("vtrain multi", "vtrain single"),
}


@dataclass(frozen=True)
class PublishedRow:
    """One run."""

    line: int
    sizes: TransformerSizes
    strategy: str
    workers: int
    batch: int
    microbatch: int | None
    recompute: Recompute
    seconds: float
    dp: int = 1

    @property
    def question(self) -> tuple[object, ...]:
        return (self.sizes, self.workers, self.batch)


@dataclass(frozen=True)
class PublishedTable:
    """Runs of one source; what is not said is as Megatron-LM on a DGX has it."""

    name: str
    rows: tuple[TimedRow, ...]
    runs_as: RunsAs = _MEGATRON_LM
    cluster: str = "dgx-a100"  # of its GPUs: the preset

    @property
    def source(self) -> str:
        """The paper or project that all such tables are of."""
        return next((name for name, tables in PROJECTS.items() if self.name in tables), self.name)


_SOURCES: dict[str, tuple[RunsAs, str]] = {
    "ptd": (_MEGATRON_2021, "dgx-a100"),  # Narayanan et al., SC'21, table 2: PTD-P
    "zero-3": (  # the same: ZeRO-3 of DeepSpeed
        RunsAs(overlap=True, precision=FP16, zero3_of="deepspeed"),
        "dgx-a100",
    ),
    # Korthikanti et al. 2022, section 6.3: 8 replicas of the 530B model
    "dp8": (_MEGATRON_LM, "dgx-a100"),
    # Jiang et al., NSDI 2024, tables 1 and 2: the rows of Megatron-LM; 8 x 8, 6 chunks
    "megascale": (RunsAs(precision=BF16), "dgx-a100"),
    # the same: MegaScale itself, whose sends and calls of tp run beside products. The window of its
    # attention is not said: here it sees all
    "megascale own": (
        RunsAs(
            overlap=True,
            precision=BF16,
            flash_attention=True,
            bucket_mb=None,
            hide=("tp", "pp"),
        ),
        "dgx-a100",
    ),
    # Dubey et al., "The Llama 3 Herd of Models", table 4. Its FSDP keeps parameters after forward,
    # scatters gradients and gathers parameters by layers: in time, ddp with buckets of a layer. It
    # sends between stages while it computes (section 3.3.2)
    "llama": (
        RunsAs(precision=BF16, overlap=True, flash_attention=True, hide=("pp",)),
        "dgx-h100",
    ),
    # Smith et al., "Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B", section 2.4,
    # which does not say whether its kernels are fused: it is as slow as without
    "mt-nlg": (replace(DEEPSPEED, eager=POINTWISE), "dgx-a100"),
    # BigScience, BLOOM's training log and paper: 48 nodes with 4 Omni-Path links of 100 Gb/s each,
    # Megatron-LM's fused kernels, CUDA_LAUNCH_BLOCKING=1
    "bloom": (replace(DEEPSPEED, precision=BF16, nics=(4, 100), blocks=True), "dgx-a100"),
    # Black et al., sections 2.1 and 2.3, and its configuration (configs/20B.yml of GPT-NeoX): four
    # HDR links a node, A100 of 40 GB, synchronize-each-layer (before and behind each pass), GeLU
    # fused. Its 117 TFLOP/s count 6 operations a parameter and 60 s h l a token, without recompute
    "neox": (
        replace(
            DEEPSPEED,
            precision=FP16,
            nics=(4, 200),
            memory_gb_per_s=A100_40,
            waits_a_layer=4,
            eager=("norm", "add", "rotary"),
        ),
        "dgx-a100",
    ),
    # Zhao et al., "PyTorch FSDP", section 5.4
    "fsdp": (replace(_FSDP, flash_attention=False, eager=(*POINTWISE, "softmax")), "dgx-a100"),
}


def llama_operations(sizes: TransformerSizes, batch: int) -> float:
    """Without recompute; causal attention is counted once."""
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
        return operations(sizes, batch) / (workers * float(number) * 1e12)
    return llama_operations(sizes, batch) / (workers * float(number) * 989e12)


def _run(line: int, cells: list[str]) -> PublishedRow:
    model, text, *numbers, recompute, speed = cells
    workers, batch, microbatch = map(int, numbers)
    text = re.sub(r"pp\((\d+) \* (\d+)\)", r'pp(\1, schedule="interleaved", chunks=\2)', text)
    text = text.replace("sp(8)", "tp(8, sequence=True)").replace("layers", "ddp(bucket_mb=400)")
    sizes = MODELS[model]
    seconds = seconds_of(speed, sizes, batch, workers)
    how = recompute
    return PublishedRow(line, sizes, text, workers, batch, microbatch, how, seconds)


def _runs() -> Iterator[PublishedTable]:
    rows = [[cell.strip() for cell in line.split("|")] for line in RUNS.splitlines()]
    for name, (runs_as, cluster) in _SOURCES.items():
        found = [_run(n, cells) for n, (table, *cells) in enumerate(rows, 1) if table == name]
        yield PublishedTable(name, tuple(found), runs_as, cluster)


def _zero_bubble() -> PublishedTable:
    rows = []
    for line, text in enumerate(ZERO_BUBBLE.splitlines(), 1):
        model, stages, microbatch, count, times, bubble = text.split("|")
        layers, hidden, heads = map(int, model.split())
        sizes = TransformerSizes(layers, hidden, heads, sequence=1024)
        busy_s = int(count) * sum(map(float, times.split())) / 1e3
        rows.append(
            PublishedRow(
                line,
                sizes,
                f"pp({int(stages)})",
                int(stages),
                int(count) * int(microbatch),
                int(microbatch),
                "none",
                busy_s / (1 - float(bubble)),
            )
        )
    return PublishedTable(
        "zero bubble", tuple(rows), RunsAs(even_stages=False, flash_attention=True)
    )


def _mpt() -> Iterator[PublishedTable]:
    """MosaicML, llm-foundry, scripts/train/benchmarking: FSDP in nodes with 8 links of 200 Gb/s."""
    lines = (Path(__file__).parent / "mpt.csv").read_text().splitlines()
    by_gpu: dict[str, list[PublishedRow]] = {}
    for line, row in enumerate(csv.DictReader(lines), 2):
        sizes = TransformerSizes(
            *_MPT[row["model"]], vocab=50368, sequence=int(row["sequence"]), dropout=False
        )
        workers, batch = int(row["gpus"]), int(row["batch"])
        seconds = batch * sizes.sequence / (workers * float(row["tokens_per_s_per_gpu"]))
        found = PublishedRow(
            line,
            sizes,
            "zero(3)",
            workers,
            batch,
            int(row["microbatch"]),
            row["recompute"],
            seconds,
        )
        by_gpu.setdefault(row["gpu"], []).append(found)
    for gpu, rows in by_gpu.items():
        runs_as = replace(_FSDP, memory_gb_per_s=A100_40)
        if gpu != "a100-40":
            runs_as = replace(_FSDP, precision=BF16, ampere_attention=gpu == "h100")
        cluster = "dgx-h100" if gpu == "h100" else "dgx-a100"
        yield PublishedTable(f"mpt {gpu}", tuple(rows), runs_as, cluster)


def _of_text(name: str, text: str, runs_as: RunsAs = _MEGATRON_LM) -> PublishedTable:
    return PublishedTable(name, tuple(read_rows(Path(name), text, TableDefaults())), runs_as)


def published_tables(more: Path | None = None) -> list[PublishedTable]:
    """All tables; with those of vTrain where a folder has them."""
    tables = [
        _of_text("sc21 table 1", MEGATRON_TABLE_1, _MEGATRON_2021),
        _of_text("korthikanti", KORTHIKANTI_TABLE_5),
        *_runs(),
        _zero_bubble(),
        *_mpt(),
    ]
    for kind in ("multi", "single") if more is not None else ():
        path = cast("Path", more) / f"vtrain_ground_truth_{kind}.csv"
        rows: list[MeasuredRow] = read_table(path, TableDefaults())
        tables.append(PublishedTable(f"vtrain {kind}", tuple(rows), _MEGATRON_2021))
    return tables
