"""One process with all cores of a host against workers that share them, the same global batch.

Every way is a run of its own; runs take turns, `rounds` times. A round's figure is the median over
its steps, and the ratio is to the process alone in the same round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch.nn import functional as F

import shoal
from benchmarks.harness import (
    Timing,
    measure_in_workers,
    options_of_worker,
    say,
    spread,
    write_result,
)
from benchmarks.step import mlp
from shoal.commands.launching import config_for, strategy_for
from shoal.commands.output import plain_table
from shoal.sync.optimizer_step import OptimizerFactory

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=1e-4),
}


class Way(NamedTuple):
    strategy: str
    workers: int


def measure(job: shoal.Job, optimizer: str, batch_size: int, steps: int) -> Any:
    """Milliseconds of each step, after two that are not counted."""
    model, _, inputs, targets = mlp(2048, batch_size)
    step = job.step(model, F.cross_entropy, optimizer=OPTIMIZERS[optimizer])
    [batch] = job.batches([(inputs, targets)])
    times = []
    for _ in range(steps + 2):
        start_s = time.perf_counter()
        step(batch)
        times.append(1e3 * (time.perf_counter() - start_s))
    return times[2:]


def run(ways: Sequence[Way], optimizer: str, batch_size: int, rounds: int, steps: int) -> Any:
    """Of each way the medians of its rounds, and their ratios to the first way's."""
    found: dict[Way, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 else reversed(ways):
            say(f"round {number + 1}: {way.strategy} on {way.workers}, {optimizer}")
            asked = {"optimizer": optimizer, "batch-size": batch_size, "steps": steps}
            config = config_for(strategy_for(way.strategy, way.workers), device="cpu")
            times = measure_in_workers("benchmarks.host", asked, way.workers, config)
            found[way].append(statistics.median(times))
    alone = found[ways[0]]
    return [
        {
            "strategy": way.strategy,
            "workers": way.workers,
            "optimizer": optimizer,
            "rounds_ms": of_way,
            "ratios": [mine / single for mine, single in zip(of_way, alone, strict=True)],
        }
        for way, of_way in found.items()
    ]


def table_of(results: list[Any]) -> Table:
    heads = ["strategy", "optimizer", "workers", "ms a step", "to one\nprocess"]
    rows = []
    for r in results:
        times, ratios = (asdict(Timing.of(r[key])) for key in ("rounds_ms", "ratios"))
        cells = [spread(each, "_ms") for each in (times, ratios)]
        rows.append([r["strategy"], r["optimizer"], str(r["workers"]), *cells])
    return plain_table("MLP of 17 million parameters: median (quartiles)", heads, rows, left=2)


if __name__ == "__main__":
    args = options_of_worker(optimizer=str, batch_size=int, steps=int)
    asked = (args.optimizer, args.batch_size, args.steps)
    write_result(lambda job: measure(job, *asked), args.result)
