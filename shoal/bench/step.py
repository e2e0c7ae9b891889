"""What a step costs: Shoal, the plain PyTorch loop, and DistributedDataParallel.

Run by `shoal bench step`, in one process or in each of several workers. Every way trains its own
copy of the same model on the same batches.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.bench.alternate import Timing, alternate, ratios

Workload = tuple[nn.Module, Callable[[Any, Any], Tensor], Tensor, Tensor]
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def mlp(width: int, batch_size: int) -> Workload:
    """Four layers of `width`: 17 million parameters at 2048."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return model, F.cross_entropy, torch.randn(batch_size, width), torch.arange(batch_size) % 10


def digits(batch_size: int) -> Workload:
    from shoal.examples.digits import DigitsNet

    return (
        DigitsNet(),
        F.cross_entropy,
        torch.randn(batch_size, 1, 8, 8),
        torch.arange(batch_size) % 10,
    )


def gpt(size_name: str, batch_size: int) -> Workload:
    from shoal.examples.gpt import GPT, SIZES, VOCABULARY, next_token_loss

    size = SIZES[size_name]
    tokens = torch.randint(0, VOCABULARY, (batch_size, size.context))
    return GPT(size), next_token_loss, tokens, tokens.roll(-1, 1)


WORKLOADS: dict[str, Callable[[int], Workload]] = {
    "mlp": partial(mlp, 2048),
    "mlp-small": partial(mlp, 256),
    "digits": digits,
    "gpt": partial(gpt, "small"),
    "gpt-medium": partial(gpt, "medium"),
    "gpt-large": partial(gpt, "large"),
}


def plain_step(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], batch: tuple[Tensor, Tensor]
) -> Callable[[], None]:
    """The loop of every PyTorch tutorial; `model` may be a DistributedDataParallel."""
    optimizer = SGD(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def measure(job: shoal.Job, workload: str, batch_size: int, rounds: int, steps: int) -> Any:
    """Milliseconds per step of Shoal and the peer, and the ratio of the peer's time to Shoal's."""
    model, loss, inputs, targets = WORKLOADS[workload](batch_size)
    model = model.to(job.device)
    inputs = inputs.to(job.device)
    targets = targets.to(job.device)
    peer: nn.Module = copy.deepcopy(model)
    if job.size > 1:
        peer = nn.parallel.DistributedDataParallel(peer)
    ours = job.step(model, loss, optimizer=SGD, batchnorm="local")
    batch = next(iter(job.batches([(inputs, targets)])))
    ways: dict[str, Callable[[], Any]] = {
        "shoal": lambda: ours(batch),
        "peer": plain_step(peer, loss, (batch[0], batch[1])),
    }
    times = alternate(ways, rounds, steps, _barrier(job), _synchronize(job))
    return {
        "workload": workload,
        "workers": job.size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch_size": batch_size,
        "peer": "DistributedDataParallel" if job.size > 1 else "plain loop",
        "backend": dist.get_backend() if job.size > 1 else None,
        "shoal": asdict(Timing.of(times["shoal"])),
        "theirs": asdict(Timing.of(times["peer"])),
        "ratio": _unitless(ratios(times["shoal"], times["peer"])),
    }


def _unitless(timing: Timing) -> dict[str, float]:
    return {"median": timing.median_ms, "low": timing.low_ms, "high": timing.high_ms}


def _barrier(job: shoal.Job) -> Callable[[], None]:
    return lambda: job.group.barrier().wait()


def _synchronize(job: shoal.Job) -> Callable[[], None]:
    return torch.cuda.synchronize if job.device.type == "cuda" else lambda: None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()

    def train(job: shoal.Job) -> None:
        results = measure(job, args.workload, args.batch_size, args.rounds, args.steps)
        if job.rank == 0:
            args.result.write_text(json.dumps(results))

    shoal.run(train)


if __name__ == "__main__":
    main()
