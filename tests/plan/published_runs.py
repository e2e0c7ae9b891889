"""Training runs whose sizes, split and speed were published; nothing was fitted to them.

Speed is seconds of a step, TFLOP/s a GPU as Narayanan et al. count them (with recompute), or the
MFU. What a source does not say is noted: micro-batches of 1 where memory allows no more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.plan.workloads import Precision, Recompute
from shoal.plan.workloads.transformer_block import TransformerSizes

FP16 = Precision("fp16", 2, 4, 4, 8)
BF16 = Precision("bf16", 2, 4, 4, 8)
PURE_BF16 = Precision("bf16", 2, 2, 4, 8)  # gradients are sent in bf16

GPT_175B = TransformerSizes(96, 12288, 96)
GPT_530B = TransformerSizes(105, 20480, 128)
BLOOM = TransformerSizes(70, 14336, 112, vocab=250880)
NEOX = TransformerSizes(44, 6144, 64, vocab=50432, tied=False)
LLAMA_405B = TransformerSizes(
    126,
    16384,
    128,
    vocab=128256,
    sequence=8192,
    kv_heads=8,
    ffn=53248,
    gated=True,
    dropout=False,
    tied=False,
    learned_positions=False,
)


@dataclass(frozen=True)
class PublishedRun:
    source: str
    sizes: TransformerSizes
    strategy: str
    workers: int
    batch: int
    microbatch: int
    recompute: Recompute
    seconds: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    preset: str = "dgx-a100"
    nics: tuple[int, float] | None = None  # of a node: how many, and Gb/s; None: as the preset
    precision: Precision = FP16
    flash_attention: bool = False
    overlap: bool = False
    scatter_sends: bool = True  # of Megatron-LM; DeepSpeed's pipeline sends whole activations

    @property
    def measured_s(self) -> float:
        if self.seconds is not None:
            return self.seconds
        if self.tflops is not None:
            return self._operations(96) / (self.workers * self.tflops * 1e12)
        assert self.mfu is not None
        peak = 989e12 if self.preset == "dgx-h100" else 312e12
        return self._model_operations() / (self.workers * self.mfu * peak)

    def _operations(self, of_layer: int) -> float:
        """Narayanan et al., SC'21, equation 3; 72 in place of 96: without recompute."""
        sizes = self.sizes
        s, h, layers = sizes.sequence, sizes.hidden, sizes.layers
        more = 1 + s / (6 * h) + 6 * sizes.vocab / (of_layer * layers * h)
        return of_layer * self.batch * s * layers * h**2 * more

    def _model_operations(self) -> float:
        if not self.sizes.gated:
            return self._operations(72)
        sizes = self.sizes  # Llama: causal attention is counted once
        per_layer = 2 * sizes.hidden * (sizes.hidden + sizes.key_heads * sizes.head_size)
        per_layer += 3 * sizes.hidden * sizes.inner
        weights = sizes.layers * per_layer + sizes.vocab * sizes.hidden
        attention = 6 * sizes.layers * sizes.hidden * sizes.sequence
        return self.batch * sizes.sequence * (6.0 * weights + attention)


def _interleaved(stages: int, chunks: int) -> str:
    return f'pp({stages}, schedule="interleaved", chunks={chunks})'


# Narayanan et al., SC'21, table 2: PTD-P
PTD = tuple(
    PublishedRun("SC'21 table 2", sizes, strategy, gpus, batch, 1, "full", tflops=tflops)
    for sizes, strategy, batch, rows in (
        (GPT_175B, "ddp + tp(8) + pp(12)", 1536, ((384, 153), (768, 149), (1536, 141))),
        (
            GPT_530B,
            f"ddp + tp(8) + {_interleaved(35, 3)}",
            2240,
            ((560, 171), (1120, 167), (2240, 159)),
        ),
    )
    for gpus, tflops in rows
)
# Korthikanti et al. 2022, section 6.3: 8 replicas of the 530B model
KORTHIKANTI_DP8 = PublishedRun(
    "Korthikanti 6.3",
    GPT_530B,
    f"ddp + tp(8, sequence=True) + {_interleaved(35, 3)}",
    2240,
    2240,
    1,
    "selective",
    seconds=39.15,
)
# Jiang et al., "MegaScale", NSDI 2024, table 2: the rows of Megatron-LM; 8 x 8, 6 chunks
MEGASCALE = tuple(
    PublishedRun(
        "MegaScale table 2",
        replace(GPT_175B, dropout=False),
        f"ddp + tp(8, sequence=True) + {_interleaved(8, 6)}",
        gpus,
        batch,
        1,
        "selective",
        mfu=mfu,
        precision=BF16,
    )
    for gpus, batch, mfu in (
        (256, 768, 0.530),
        (512, 768, 0.499),
        (768, 768, 0.467),
        (1024, 768, 0.447),
        (3072, 6144, 0.487),
        (6144, 6144, 0.478),
        (8192, 6144, 0.433),
        (12288, 6144, 0.412),
    )
)
# Dubey et al., "The Llama 3 Herd of Models", table 4. Its FSDP keeps parameters after forward, and
# scatters gradients and gathers parameters a layer at a time: in time, ddp with buckets of a layer
LLAMA = tuple(
    PublishedRun(
        "Llama 3 table 4",
        replace(LLAMA_405B, sequence=sequence),
        f"ddp(bucket_mb=400) + tp(8, sequence=True){cp} + {_interleaved(16, 8)}",
        gpus,
        batch,
        1,
        "none",
        mfu=mfu,
        preset="dgx-h100",
        precision=BF16,
        flash_attention=True,
        overlap=True,
    )
    for gpus, sequence, batch, cp, mfu in (
        (8192, 8192, 2048, "", 0.43),
        (16384, 8192, 2048, "", 0.41),
        (16384, 131072, 128, " + cp(16)", 0.38),
    )
)
# Smith et al., "Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B", section 2.4
MT_NLG = tuple(
    PublishedRun(
        "MT-NLG",
        GPT_530B,
        "ddp + tp(8) + pp(35)",
        gpus,
        1920,
        1,
        "full",
        seconds=seconds,
        scatter_sends=False,
    )
    for gpus, seconds in ((2240, 60.1), (2800, 50.2), (3360, 44.4))
)
# BigScience, BLOOM's training log and paper: 48 nodes with 4 Omni-Path links of 100 Gb/s each
BLOOM_176B = PublishedRun(
    "BLOOM",
    BLOOM,
    "zero(1) + tp(4) + pp(12)",
    384,
    2048,
    2,
    "full",
    tflops=150,
    nics=(4, 100),
    precision=BF16,
    scatter_sends=False,
)
# Black et al., "GPT-NeoX-20B", section 2.3 and table of its configuration: two HDR links a node
NEOX_20B = PublishedRun(
    "GPT-NeoX-20B",
    NEOX,
    "zero(1) + tp(2) + pp(4)",
    96,
    1536,
    4,
    "full",
    tflops=117,
    nics=(2, 200),
    scatter_sends=False,
)
# Zhao et al., "PyTorch FSDP", section 5.4: GPT-175B on 128 A100, 1 and 2 samples a GPU
FSDP = tuple(
    PublishedRun(
        "PyTorch FSDP",
        replace(GPT_175B, dropout=False),
        "zero(3)",
        128,
        128 * microbatch,
        microbatch,
        "full",
        tflops=tflops,
        precision=PURE_BF16,
        overlap=True,
    )
    for microbatch, tflops in ((1, 173), (2, 186))
)
