"""Pulls of rows that follow a power law, from servers that each own a range of them.

`python -m benchmarks rows` starts the workers of one run. Three tables with the same rows are
pulled from alternately:

    owners    every row is asked of its owner
    copies    hot rows are copied to all servers, and asked of the least loaded one
    cache     the same, and workers use a row again for some steps

A pull asks for the distinct ids of one batch; all of them were pulled before. Besides the time of
a pull, the CPU time of workers and of every server is measured, and what the links of hosts carry:
where servers have hosts of their own, the busiest server or link bounds the pulls per second.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import shoal
from benchmarks.harness import options_of_worker, write_result
from shoal.comm.objects import all_gather_object
from shoal.replica.flat_params import FlatParams
from shoal.runtime.config import RunConfig
from shoal.server.client.link import ServerLink
from shoal.server.embedding.spec import RowOptimizer, TableSpec
from shoal.server.rows.client import ServerStore
from shoal.sync import Replica, plan_for
from shoal.sync.optimizer_step import OptimizerStep
from shoal.sync.ps.worker import PsWorker

WAYS = ("owners", "copies", "cache")
_BATCHES = 64  # that a worker pulls in turn
_LR = 0.1


@dataclass
class Round:
    """What was measured of one way in one round."""

    seconds: float
    worker_cpu_s: float  # of all workers
    server_cpu_s: list[float] = field(default_factory=list)
    busiest_link_bytes: int = 0  # in one direction


def zipf_batches(rows: int, exponent: float, batch: int, seed: int) -> list[Tensor]:
    """Distinct ids of batches; the chance of row k is proportional to 1 / (k + 1)^exponent."""
    chances = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    random = np.random.RandomState(seed)
    drawn = (random.random_sample(batch) * chances[-1] for _ in range(_BATCHES))
    return [torch.from_numpy(np.unique(np.searchsorted(chances, draws))) for draws in drawn]


class RowBench:
    """One worker of the benchmark."""

    def __init__(self, job: shoal.Job, args: argparse.Namespace):
        self.job = job
        self.args = args
        self.batches = zipf_batches(args.rows, args.exponent, args.batch, job.rank)
        self.rounds: dict[str, list[Round]] = {way: [] for way in WAYS}
        flat = FlatParams([("weight", nn.Parameter(torch.zeros(1024)))])
        update = OptimizerStep(flat.named, partial(torch.optim.SGD, lr=_LR))
        config = RunConfig.from_environment()
        self._host = config.hostname or ""
        replica = Replica(flat, update, job.group, config=config)
        sync = plan_for(job.strategy.sync_for(job.size), job.size).build(replica)
        assert isinstance(sync, PsWorker)
        self.sync = sync
        self.store: ServerStore = sync.row_store()
        self.tables = {way: self.store.create(self._spec(way)) for way in WAYS}
        self._next = 0

    def _spec(self, way: str) -> TableSpec:
        return TableSpec(
            way,
            self.args.rows,
            self.args.dim,
            optimizer=RowOptimizer("sgd", _LR),
            placement="range",
            hot_share=0.0 if way == "owners" else self.args.share,
            cache_steps=self.args.cache if way == "cache" else 0,
        )

    def run(self) -> None:
        for way in WAYS:
            self.tables[way].pull(torch.unique(torch.cat(self.batches)))
            self._pulls(way, self.args.warmup)
        for number in range(self.args.rounds):
            for way in WAYS if number % 2 else reversed(WAYS):
                self.rounds[way].append(self._round(way))

    def _round(self, way: str) -> Round:
        """The time until all workers have done their pulls."""
        before = self._cpu_s()
        carried = self._link_bytes()
        self._barrier()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        self._pulls(way, self.args.pulls)
        worker_cpu_s = time.process_time() - start_cpu_s
        self._barrier()
        seconds = time.perf_counter() - start_s
        carried = self._link_bytes() - carried
        after = self._cpu_s()
        used = [end - start for start, end in zip(before, after, strict=True)]
        counted = all_gather_object(self.job.group, [worker_cpu_s, dict(carried)])
        in_sum = sum((Counter(of_links) for _, of_links in counted), Counter[str]())
        return Round(
            seconds, sum(cpu_s for cpu_s, _ in counted), used, max(in_sum.values(), default=0)
        )

    def _link_bytes(self) -> Counter[str]:
        return link_bytes(self._host, self.sync.client.links)

    def _pulls(self, way: str, count: int) -> None:
        for _ in range(count):
            self.tables[way].pull(self.batches[self._next % _BATCHES])
            self.tables[way].pushes += 1  # a step of training is over
            self._next += 1

    def _cpu_s(self) -> list[float]:
        """CPU seconds of each server so far; rank 0 asks."""
        self._barrier()
        if self.job.rank:
            return []
        return [counts["cpu_s"] for counts in self.sync.client.stats()]

    def _barrier(self) -> None:
        self.job.group.barrier().wait()

    def results(self) -> dict[str, Any]:
        """After `sync.close`: speeds of each way, and how its load was spread."""
        loads = self.sync.report()["tables"]
        pulls = self.args.pulls * self.job.size
        ways = {}
        for way, rounds in self.rounds.items():
            ways[way] = {
                "pulls_per_s": [pulls / each.seconds for each in rounds],
                "busiest_server_pulls_per_s": [pulls / max(e.server_cpu_s) for e in rounds],
                "max_over_mean_cpu": [_max_over_mean(each.server_cpu_s) for each in rounds],
                "worker_cpu_ms": [1e3 * each.worker_cpu_s / pulls for each in rounds],
                "server_cpu_ms": [1e3 * sum(each.server_cpu_s) / pulls for each in rounds],
                "busiest_link_bytes": [each.busiest_link_bytes / pulls for each in rounds],
                "max_over_mean_load": loads[way]["max_over_mean_as_served"],
                "load": loads[way]["as_served"],
                "copied_rows": loads[way]["copied_rows"],
            }
        cache = self.tables["cache"].cache
        return {
            "rows_per_pull": sum(map(len, self.batches)) / len(self.batches),
            "hit_rate": cache.hit_rate if cache is not None else 0.0,
            "ways": ways,
        }


def _max_over_mean(values: list[float]) -> float:
    return max(values) * len(values) / sum(values) if sum(values) else 1.0


def link_bytes(host: str, links: Sequence[ServerLink]) -> Counter[str]:
    """Bytes of one worker so far, by link and direction: `HOST out` and `HOST in`.

    Without headers of TCP. A server of the worker's own host is not reached over a link.
    """
    carried: Counter[str] = Counter()
    for link in links:
        server = link.route.address.removeprefix("tcp:").rpartition(":")[0]
        if link.route.is_unix or server == host:
            continue
        for source, target, count in (
            (host, server, link.sent_bytes),
            (server, host, link.received_bytes),
        ):
            carried[f"{source} out"] += count
            carried[f"{target} in"] += count
    return carried


def main() -> None:
    names = ("rows", "dim", "batch", "pulls", "rounds", "warmup", "cache")
    args = options_of_worker(**dict.fromkeys(names, int), exponent=float, share=float)

    def measure(job: shoal.Job) -> dict[str, Any] | None:
        torch.set_num_threads(1)
        bench = RowBench(job, args)
        try:
            bench.run()
        finally:
            bench.sync.close()
        return None if job.rank else bench.results()  # rank 0 has asked the servers

    write_result(measure, args.result)


if __name__ == "__main__":
    main()
