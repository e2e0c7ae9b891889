"""What a step costs: Shoal, the plain PyTorch loop, and DistributedDataParallel.

`python -m benchmarks step` starts one process or several workers. Every way trains its own copy of
the same model on the same batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from benchmarks.harness import (
    alternate,
    beside_peer,
    measure_in_workers,
    options_of_worker,
    peer_cells,
    say,
    write_result,
)
from shoal.commands.launching import config_for, strategy_for
from shoal.commands.output import plain_table

Workload = tuple[nn.Module, Callable[[Any, Any], Tensor], Tensor, Tensor]
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def mlp(width: int, batch_size: int) -> Workload:
    """Four layers of `width`: 17 million parameters at 2048."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return model, F.cross_entropy, torch.randn(batch_size, width), torch.arange(batch_size) % 10


def digits(batch_size: int) -> Workload:
    from shoal.commands.examples.digits import DigitsNet

    return (
        DigitsNet(),
        F.cross_entropy,
        torch.randn(batch_size, 1, 8, 8),
        torch.arange(batch_size) % 10,
    )


def gpt(size_name: str, batch_size: int) -> Workload:
    from shoal.commands.examples.gpt import GPT, SIZES, VOCABULARY, next_token_loss

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


# name -> (batch size, steps a round): rounds of about a quarter of a second on one core
ROUNDS = {"digits": (64, 60), "gpt": (16, 4), "mlp": (64, 4), "mlp-small": (64, 100)}


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
        **beside_peer(times),
    }


def _barrier(job: shoal.Job) -> Callable[[], None]:
    return lambda: job.group.barrier().wait()


def _synchronize(job: shoal.Job) -> Callable[[], None]:
    return torch.cuda.synchronize if job.device.type == "cuda" else lambda: None


def run(name: str, workers: int, rounds: int, device: str | None) -> Any:
    """What so many workers measure."""
    say(f"measuring {name} on {workers}")
    batch_size, steps = ROUNDS[name]
    asked = {"workload": name, "batch-size": batch_size, "rounds": rounds, "steps": steps}
    config = config_for(strategy_for(None, workers), device=device)
    return measure_in_workers("benchmarks.step", asked, workers, config)


def table_of(results: list[Any]) -> Table:
    heads = ["workload", "peer", "workers", "param-\neters", "shoal", "peer", "peer /\nshoal"]
    rows = [
        [
            r["workload"],
            "DDP" if r["workers"] > 1 else r["peer"],
            str(r["workers"]),
            f"{r['parameters']:,}",
            *peer_cells(r),
        ]
        for r in results
    ]
    return plain_table("ms a step: median (quartiles)", heads, rows, left=2)


def main(measure: Callable[..., Any] = measure) -> None:
    """A worker of a benchmark of these workloads."""
    args = options_of_worker(workload=str, batch_size=int, rounds=int, steps=int)
    asked = (args.workload, args.batch_size, args.rounds, args.steps)
    write_result(lambda job: measure(job, *asked), args.result)


if __name__ == "__main__":
    main()
