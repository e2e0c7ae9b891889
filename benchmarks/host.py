"""One process with all cores of a host against workers that share them, the same global batch.

Every way is a run of its own; runs take turns, `rounds` times. A round's figure is the median over
its steps, and the ratio is to the process alone in the same round. Beside it stands that of as many
processes that compute their samples, add up and update as many bytes as ddp does (gossip: mix as
many as a ring does, and update all), in memory of their own, and wait for nobody; the slowest of
each step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import shoal
from benchmarks.harness import (
    Timing,
    measure_in_workers,
    say,
    spread,
    worker_parser,
    write_result,
)
from benchmarks.step import mlp
from shoal.commands.launching import config_for, run_quietly, strategy_for
from shoal.commands.output import plain_table
from shoal.errors import ShoalError
from shoal.runtime.config import RunConfig
from shoal.runtime.memory_limit import cores, keep_freed_memory
from shoal.sync.optimizer_step import OptimizerFactory

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=1e-4),
}


ALONE = "no exchange"
ALONE_GOSSIP = "no exchange, gossip"
PEERS = ("plain loop", "torch DDP", ALONE, ALONE_GOSSIP)


class Way(NamedTuple):
    strategy: str  # or one of PEERS
    workers: int


def measure(job: shoal.Job, optimizer: str, batch_size: int, steps: int) -> Any:
    """Milliseconds of each step, after two that are not counted."""
    model, _, inputs, targets = mlp(2048, batch_size)
    step = job.step(model, F.cross_entropy, optimizer=OPTIMIZERS[optimizer])
    [batch] = job.batches([(inputs, targets)])
    return timed(lambda: step(batch), steps)


def timed(step: Callable[[], object], steps: int) -> list[float]:
    times = []
    for _ in range(steps + 2):
        start_s = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start_s))
    return times[2:]


def measure_peer(
    rank: int, size: int, store: Path, asked: tuple[str, int, int], peer: str
) -> list[float]:
    """The same by the loop of every tutorial, without Shoal; with DistributedDataParallel."""
    optimizer, batch_size, steps = asked
    model, loss, inputs, targets = mlp(2048, batch_size)
    if size > 1:
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    if peer in (ALONE, ALONE_GOSSIP):
        keep_freed_memory()  # as Shoal's workers do
    elif size > 1:
        model = nn.parallel.DistributedDataParallel(model)
    named = dict(model.named_parameters())
    if peer == ALONE:
        parts = {name: p.detach().view(-1)[: p.numel() // size] for name, p in named.items()}
        named = {name: nn.Parameter(part) for name, part in parts.items()}
    updates = OPTIMIZERS[optimizer](named.items())
    neighbors = [[p.detach().clone() for p in named.values()] for _ in range(2)]
    mine = slice(rank * batch_size // size, (rank + 1) * batch_size // size)

    def step() -> None:
        updates.zero_grad()
        loss(model(inputs[mine]), targets[mine]).backward()  # type: ignore[no-untyped-call]
        if peer == ALONE:
            add_up(list(model.parameters()), list(named.values()), size)
        if peer == ALONE_GOSSIP:
            mix(list(named.values()), neighbors)
        updates.step()

    if size == 1:
        return timed(step, steps)
    dist.barrier()
    slowest = torch.tensor(timed(step, steps))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)  # whom others wait for in that step
    return slowest.tolist()


def add_up(whole: Sequence[nn.Parameter], slices: Sequence[nn.Parameter], size: int) -> None:
    """Each slice gets the sum of `size` pieces of a gradient, which is then dropped."""
    for p, part in zip(whole, slices, strict=True):
        assert p.grad is not None
        pieces = p.grad.view(-1)[: size * part.numel()].view(size, -1)
        part.grad = pieces.sum(0)
        p.grad = None


@torch.no_grad()
def mix(own: Sequence[nn.Parameter], neighbors: Sequence[Sequence[torch.Tensor]]) -> None:
    """The mean of a worker's weights and those of its neighbors."""
    for p, *theirs in zip(own, *neighbors, strict=True):
        for each in theirs:
            p.add_(each)
        p.div_(1 + len(theirs))


def run_peers(peer: str, words: list[str], workers: int, config: RunConfig) -> None:
    """Processes that know nothing of Shoal, with an equal share of the cores each."""
    threads = {"OMP_NUM_THREADS": str(max(1, cores() // workers))}
    started = [
        subprocess.Popen(
            [*words, "--peers", f"{rank}/{workers}", "--peer", peer], env={**os.environ, **threads}
        )
        for rank in range(workers)
    ]
    if any([process.wait() for process in started]):
        raise ShoalError("a process of the plain loop failed")


def run(ways: Sequence[Way], optimizer: str, batch_size: int, rounds: int, steps: int) -> Any:
    """Of each way the medians of its rounds, and their ratios to the first way's."""
    found: dict[Way, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 else reversed(ways):
            asked = {"optimizer": optimizer, "batch-size": batch_size, "steps": steps}
            is_peer = way.strategy in PEERS
            strategy = strategy_for(None if is_peer else way.strategy, way.workers)
            config = config_for(strategy, device="cpu")
            start = partial(run_peers, way.strategy) if is_peer else run_quietly
            times = measure_in_workers("benchmarks.host", asked, way.workers, config, start)
            found[way].append(statistics.median(times))
            name = f"{way.strategy} on {way.workers}, {optimizer}"
            say(f"round {number + 1}: {name}: {found[way][-1]:.1f} ms a step")
    alone = found[ways[0]]
    return [
        {
            "strategy": way.strategy,
            "workers": way.workers,
            "optimizer": optimizer,
            "rounds_ms": of_way,
            "ratios": ratios_to(alone, of_way),
            "bound_ratios": ratios_to(alone, found.get(bound_of(way), alone)),
        }
        for way, of_way in found.items()
        if way.strategy not in (ALONE, ALONE_GOSSIP)
    ]


def bound_of(way: Way) -> Way:
    return Way(ALONE_GOSSIP if way.strategy.startswith("gossip") else ALONE, way.workers)


def ratios_to(alone: Sequence[float], of_way: Sequence[float]) -> list[float]:
    return [mine / single for mine, single in zip(of_way, alone, strict=True)]


def table_of(results: list[Any]) -> Table:
    heads = ["strategy", "optimizer", "workers", "ms a step", "to one\nprocess", ALONE]
    rows = []
    for r in results:
        timings = (asdict(Timing.of(r[key])) for key in ("rounds_ms", "ratios", "bound_ratios"))
        cells = [spread(each, "_ms") for each in timings]
        rows.append([r["strategy"], r["optimizer"], str(r["workers"]), *cells])
    return plain_table("MLP of 17 million parameters: median (quartiles)", heads, rows, left=2)


if __name__ == "__main__":
    parser = worker_parser(optimizer=str, batch_size=int, steps=int)
    parser.add_argument("--peers")
    parser.add_argument("--peer")
    args = parser.parse_args()
    asked = (args.optimizer, args.batch_size, args.steps)
    if args.peers is None:
        write_result(lambda job: measure(job, *asked), args.result)
    else:
        rank, size = map(int, args.peers.split("/"))
        found = measure_peer(rank, size, args.result.with_suffix(".store"), asked, args.peer)
        if rank == 0:
            args.result.write_text(json.dumps(found))
