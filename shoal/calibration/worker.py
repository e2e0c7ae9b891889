"""This machine as training sees it, measured in each of several workers at the same time.

Run by `shoal cluster calibrate`, once for each number of workers. Rank 0 writes what it measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.calibration.calls import CallBench, HandoverBench
from shoal.calibration.kernels import KernelBench
from shoal.calibration.sampling import Synchronize, sample_rounds
from shoal.strategy.strategy import as_strategy
from shoal.train.job import Job

_STEPS = 50
_SERVED_STEPS = 20
_ROUNDS = 5
_PUSHES = 3
_LOCKSTEP = "ps"
_ASYNC = 'ps(mode="async")'
_BYTES = (1 << 20, 8 << 20, 64 << 20)
MOMENTUM = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


class Wide(nn.Module):
    """So many bytes of weights, whose gradient is written once."""

    def __init__(self, num_bytes: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_bytes // 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight.sum() * inputs.sum()


def tiny_step(job: shoal.Job, steps: int = _STEPS) -> dict[str, float]:
    """A step of a model of one tiny layer: what Shoal and the loop cost without the model."""
    return _step(job, nn.Linear(4, 4).to(job.device), steps, _ROUNDS)


def served(job: shoal.Job) -> dict[str, Any]:
    """Steps where a server holds the weights: of a tiny layer, and asynchronous ones by bytes.

    A push and pull takes a server's sum, its update and copies, while all workers do the same. To
    count passes over memory says too little of it: what caches hold differs between machines.
    """
    pushes = [_push(job, num_bytes) for num_bytes in _BYTES] if job.device.type == "cpu" else []
    tiny = partial(nn.Linear, 4, 4)
    return {
        "lockstep": _served(job, _LOCKSTEP, tiny(), _SERVED_STEPS),
        "async": _served(job, _ASYNC, tiny(), _SERVED_STEPS),
        "pushes": pushes,
    }


def _push(job: shoal.Job, num_bytes: int) -> dict[str, Any]:
    model = Wide(num_bytes)
    compute = partial(_compute, model)
    computed = sample_rounds(compute, _PUSHES, _ROUNDS, lambda: job.group.barrier().wait())
    taken = _served(job, _ASYNC, model, _PUSHES)
    return {"bytes": num_bytes, "computed": computed._asdict(), "async": taken}


def _compute(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)
    model(torch.ones(1)).backward()


def _served(job: shoal.Job, strategy: str, model: nn.Module, steps: int) -> dict[str, float]:
    with_server = Job(as_strategy(strategy), job.group, device=job.device)
    try:
        return _step(with_server, model.to(job.device), steps, _ROUNDS)
    finally:
        with_server.close()


def _step(job: shoal.Job, model: nn.Module, steps: int, rounds: int) -> dict[str, float]:
    step = job.step(model, _loss, optimizer=MOMENTUM)
    data = torch.ones(8 * job.size, 4)
    batch = next(iter(job.batches([(data, data)])))
    took = sample_rounds(lambda: step(batch), steps, rounds, lambda: job.group.barrier().wait())
    return took._asdict()


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.dim() == 0:
        return outputs
    return nn.functional.mse_loss(outputs, targets)


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
