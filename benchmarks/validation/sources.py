"""Published tables that no constant was fitted to, by source, and ranges from sources left out.

A source is all tables of one project or paper. Its rows are predicted as `shoal predict` does it,
with a preset as it is. What a table does not say is as its project has it by default:

    NeMo 24.07            NVIDIA/NeMo, docs/source/performance/performance_summary.md
    Megatron-Bridge 25.11 NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md
    NeMo AutoModel        docs.nvidia.com/nemo/automodel, performance summary: pre-training, H100
    torchtitan            pytorch/torchtitan, docs/performance.md (A100, 2024) and benchmarks/
                          llama3_h100_202412_torchtitan.md (H100 of 96 GB, 500 W),
                          llama3-8b_h200_202506_trainy-whitefiber.md
    fms-fsdp              foundation-model-stack/fms-fsdp, README.md; its 7B and 13B are HSDP
    KempnerForge          KempnerInstitute/KempnerForge, benchmarks/mfu_scaling (2026-04-05)

No row of these tables is left out but those of GB300, long contexts of torchtitan (cp with fp8), a
model that Shoal has no sizes of (Nemotron V3, Kimi K2) and one whose columns do not fit (Qwen3
235B on H100 lacks its number of GPUs or batch: it is taken as 256 and 8,192).
"""

from __future__ import annotations

import csv
import itertools
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.validation.compare import POINTWISE
from shoal.cluster import Cluster
from shoal.cluster.presets import load_cluster
from shoal.plan.accuracy import EXPERTS, RunKind, kind_of, range_of
from shoal.plan.predict import PlanSettings, Predictor, folded
from shoal.plan.prediction import Prediction
from shoal.plan.step.collective_time import MEGATRON_ORDER, SHOAL_ORDER
from shoal.plan.workloads.model_presets import transformer_named
from shoal.strategy.strategy import as_strategy

# of PyTorch's scaled_dot_product_attention on Hopper, over FlashAttention 3
_SDPA_FACTOR = 3.0
_EAGER_FACTOR = 3.0  # norms, additions and activations that nothing fuses
_LOW, _HIGH = 0.1, 0.9  # of the rows are below and above a range


@dataclass(frozen=True)
class SourceRow:
    """One run of a table, beside what is predicted."""

    source: str
    kind: RunKind
    ratio: float  # measured over predicted seconds
    low: float  # of the range that is printed for it, over predicted seconds
    high: float

    @property
    def is_inside(self) -> bool:
        return self.low <= self.ratio <= self.high


def source_rows() -> list[SourceRow]:
    lines = (Path(__file__).parent / "sources.csv").read_text().splitlines()
    return [_row(row) for row in csv.DictReader(lines)]


def _row(row: dict[str, str]) -> SourceRow:
    model = transformer_named(row["model"])
    workers, batch = int(row["gpus"]), int(row["batch"])
    text = re.sub(
        r"pp\((\d+) \* (\d+)\)", r'pp(\1, schedule="interleaved", chunks=\2)', row["strategy"]
    )
    strategy = as_strategy(text)
    is_fused = row["runs"] == "fused"  # Megatron Core, or Transformer Engine: as NVIDIA runs it
    is_folded = strategy.tp is not None and strategy.ep is not None
    hide = ("tp",) * (strategy.tp is not None) + ("pp",) * ("chunks" in text)
    settings = PlanSettings(
        batch,
        int(row["microbatch"]),
        row["recompute"],
        even_stages=is_fused,
        hide=hide if is_fused else (),
        fold_ep=is_folded,
    )
    cluster = _cluster(row["cluster"], row["runs"]).of_size(workers)
    predictor = Predictor(model, cluster, MEGATRON_ORDER if is_fused else SHOAL_ORDER)
    value = folded(strategy) if is_folded else strategy
    found: Prediction = predictor.predict(value, workers, settings)
    tokens_per_s = workers * float(row["tokens_per_s_per_gpu"])
    seconds = batch * model.sizes.sequence / tokens_per_s
    kind = kind_of(model, cluster.device)
    low, high = range_of(cluster.device, kind, workers)
    return SourceRow(row["source"], kind, seconds / found.step_s, low, high)


def _cluster(name: str, runs: str) -> Cluster:
    if name == "h200 x 4":
        there = load_cluster("dgx-h200")
        there = replace(there, node=replace(there.node, devices=4, nics=4))
    elif name == "h100 96 GB":
        there = load_cluster("dgx-h100")
        limited = replace(there.device, memory_bytes_per_s=2.4e12, power_limit_watts=500)
        there = replace(there, device=limited)
    else:
        there = load_cluster(name)
    device = there.device
    factors = dict(device.kernel_factors)
    if runs == "eager":
        factors |= {f"{one}{way}": _EAGER_FACTOR for one in POINTWISE for way in ("", " backward")}
    if runs != "fused" and "A100" not in device.name:
        slow = _SDPA_FACTOR * device.factor_of("attention")
        factors |= {"attention": slow, "attention backward": slow}
    return replace(there, device=replace(device, kernel_factors=factors))


Ratios = Sequence[tuple[str, str, float]]  # source, kind of model, measured over predicted


def ratios_of(rows: Sequence[SourceRow]) -> Ratios:
    """By kind of model as far as ranges are told apart."""
    return [
        (
            row.source,
            kind.model if kind.model == EXPERTS else f"{kind.model} in {kind.precision}",
            row.ratio,
        )
        for row in rows
        for kind in [row.kind]
    ]


def quantiles(ratios: Ratios) -> tuple[float, float]:
    """Of 80% of the rows, where every source weighs the same."""
    count = {source: 0 for source, _, _ in ratios}
    for source, _, _ in ratios:
        count[source] += 1
    pairs = sorted((ratio, 1 / count[source]) for source, _, ratio in ratios)
    return _quantile(pairs, _LOW), _quantile(pairs, _HIGH)


def _quantile(pairs: Sequence[tuple[float, float]], share: float) -> float:
    """Of (ratio, weight), sorted."""
    limit = share * sum(weight for _, weight in pairs) * (1 - 1e-9)
    passed = itertools.accumulate(weight for _, weight in pairs)
    return next(ratio for (ratio, _), so_far in zip(pairs, passed, strict=True) if so_far >= limit)


def widened(low: float, high: float, sources: int) -> tuple[float, float]:
    """A range for a source that was not there: the fewer there were, the wider."""
    middle = math.sqrt(low * high)
    half = (high / low) ** (0.5 * (1 + 1 / sources))
    return middle / half, middle * half


def ranges_of(ratios: Ratios) -> dict[str, tuple[float, float]]:
    """By kind of model."""
    found = {}
    for kind in dict.fromkeys(kind for _, kind, _ in ratios):
        some = [one for one in ratios if one[1] == kind]
        found[kind] = widened(*quantiles(some), len({source for source, _, _ in some}))
    return found


def leave_sources_out(ratios: Ratios) -> dict[str, tuple[int, float, int]]:
    """By source: its rows, their median error, and how many are in ranges of the others."""
    found = {}
    for source in dict.fromkeys(one[0] for one in ratios):
        own = [one for one in ratios if one[0] == source]
        ranges = ranges_of([one for one in ratios if one[0] != source])
        everything = ranges_of([(s, "", r) for s, _, r in ratios if s != source])[""]
        inside = sum(
            low <= ratio <= high
            for _, kind, ratio in own
            for low, high in [ranges.get(kind, everything)]
        )
        error = statistics.median(abs(1 / ratio - 1) for _, _, ratio in own)
        found[source] = (len(own), error, inside)
    return found
