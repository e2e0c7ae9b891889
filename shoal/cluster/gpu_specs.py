"""Known GPUs: what their makers' datasheets say, dense rates; NVLink per link and direction."""

from __future__ import annotations

from typing import NamedTuple


class GpuSpec(NamedTuple):
    pattern: str  # all of its words are in the name that nvidia-smi prints
    memory_GB_per_s: float
    peak_TFLOP_per_s: dict[str, float]
    nvlink_GB_per_s: float = 0.0
    most_nvlinks: int = 0


def _rates(fp32: float, tf32: float, fp16: float, fp8: float = 0.0) -> dict[str, float]:
    rates = {"fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": fp16, "fp8": fp8}
    return {dtype: rate for dtype, rate in rates.items() if rate}


# the first that fits counts
GPU_SPECS = (
    GpuSpec("GB200", 8000, _rates(80, 1250, 2500, 5000), 50, 18),
    GpuSpec("B200", 8000, _rates(75, 1100, 2250, 4500), 50, 18),
    GpuSpec("GH200", 4000, _rates(67, 494, 989, 1979), 25, 18),
    GpuSpec("H200 NVL", 4800, _rates(60, 418, 835, 1671), 25, 18),
    GpuSpec("H200", 4800, _rates(67, 494, 989, 1979), 25, 18),
    GpuSpec("H100 NVL", 3900, _rates(60, 418, 835, 1671), 25, 12),
    GpuSpec("H100 PCIe", 2000, _rates(51, 378, 756, 1513), 25, 12),
    GpuSpec("H100", 3350, _rates(67, 494, 989, 1979), 25, 18),
    GpuSpec("H800", 3350, _rates(67, 494, 989, 1979), 25, 8),
    GpuSpec("A100 80GB PCIe", 1935, _rates(19.5, 156, 312), 25, 12),
    GpuSpec("A100 80GB", 2039, _rates(19.5, 156, 312), 25, 12),
    GpuSpec("A100", 1555, _rates(19.5, 156, 312), 25, 12),
    GpuSpec("A800", 2039, _rates(19.5, 156, 312), 25, 8),
    GpuSpec("A10G", 600, _rates(31.5, 35, 70)),
    GpuSpec("A10", 600, _rates(31.2, 62.5, 125)),
    GpuSpec("A40", 696, _rates(37.4, 74.8, 149.7), 14.0625, 4),
    GpuSpec("A30", 933, _rates(10.3, 82, 165), 25, 4),
    GpuSpec("A6000", 768, _rates(38.7, 77.4, 154.8), 14.0625, 4),
    GpuSpec("L40S", 864, _rates(91.6, 183, 362, 733)),
    GpuSpec("L40", 864, _rates(90.5, 90.5, 181, 362)),
    GpuSpec("L4", 300, _rates(30.3, 60, 121, 242)),
    GpuSpec("V100", 900, _rates(15.7, 0, 125), 25, 6),
    GpuSpec("P100", 732, _rates(10.6, 0, 21.2), 20, 4),
    GpuSpec("T4", 320, _rates(8.1, 0, 65)),
    GpuSpec("RTX 5090", 1792, _rates(104.8, 104.8, 209.5, 419)),
    GpuSpec("RTX 4090", 1008, _rates(82.6, 82.6, 165.2, 330.3)),
    GpuSpec("RTX 3090", 936, _rates(35.6, 35.6, 71), 14.0625, 4),
)


def spec_of(name: str) -> GpuSpec | None:
    """The datasheet of a GPU, by the name that nvidia-smi prints."""
    words = set(name.replace("-", " ").upper().split())
    for spec in GPU_SPECS:
        if all(word.upper() in words for word in spec.pattern.split()):
            return spec
    return None
