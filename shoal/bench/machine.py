"""This machine as training sees it, measured in each of several workers at the same time.

Run by `shoal cluster calibrate`, once for each number of workers. Rank 0 writes what it measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.bench.machine_calls import CallBench
from shoal.bench.machine_handover import HandoverBench
from shoal.bench.machine_kernels import KernelBench
from shoal.bench.machine_served import served, tiny_step
from shoal.bench.sampling import Synchronize

_SHARES = {
    "products": 0.35,
    "memory": 0.1,
    "named": 0.1,
    "launches": 0.05,
    "updates": 0.1,
    "calls": 0.3,
}


def measure(job: shoal.Job, seconds: float) -> dict[str, Any]:
    synchronize = synchronize_of(job.device)
    bench = KernelBench(job.device, synchronize)
    alone = job.size == 1
    scale = 1 / (1 - _SHARES["calls"]) if alone else 1.0
    dtypes = ("fp32", "bf16", "fp16") if job.device.type == "cuda" else ("fp32",)
    each_s = _SHARES["products"] * scale * seconds / len(dtypes)
    found: dict[str, Any] = {
        "workers": job.size,
        "threads": torch.get_num_threads(),
        "device": _name(job.device),
        "memory_bytes": _memory(job.device),
        "products": {dtype: _together(job, bench.products, dtype, each_s) for dtype in dtypes},
    }
    for name in ("memory", "named", "launches", "updates"):
        found[name] = _together(job, getattr(bench, name), _SHARES[name] * scale * seconds)
    found["step"] = tiny_step(job)
    if not alone:
        found["calls"] = CallBench(job, _SHARES["calls"] * seconds).measure()
        if job.device.type == "cpu":
            found["handover"] = HandoverBench(job.group).measure()
        found["served"] = served(job)
    return found


def _together(job: shoal.Job, section: Callable[..., Any], *args: Any) -> Any:
    """Begin when all workers do: they share memory, caches and turbo."""
    job.group.barrier().wait()
    return section(*args)


def synchronize_of(device: torch.device) -> Synchronize:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _memory(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()

    def train(job: shoal.Job) -> None:
        found = measure(job, args.seconds)
        if job.rank == 0:
            args.result.write_text(json.dumps(found))

    shoal.run(train)


if __name__ == "__main__":
    main()
