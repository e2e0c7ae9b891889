"""What collectives cost: Shoal's group, its torch.distributed backend, Gloo, and the memory.

Run by `shoal bench collectives` in each of several workers; all ways are measured alternately.
The bound is what an all-reduce cannot avoid: every rank adds its share and copies the rest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from shoal.bench.compare import alternate
from shoal.group.group import Group

KINDS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
_ROUND_S = 0.02  # one round of one way takes about this long


def by_group(group: Group, kind: str, data: Tensor, whole: Tensor) -> Callable[[], Any]:
    """One call; `data` has the bytes that are asked for, `whole` as many for every rank."""
    other = whole.clone()
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: group.all_reduce(data).wait(),
        "broadcast": lambda: group.broadcast(data).wait(),
        "all_gather": lambda: group.all_gather(whole, data).wait(),
        "reduce_scatter": lambda: group.reduce_scatter(data, whole).wait(),
        "all_to_all": lambda: group.all_to_all(other, whole).wait(),
    }
    return calls[kind]


def by_torch(group: Any, kind: str, data: Tensor, whole: Tensor) -> Callable[[], Any]:
    other = whole.clone()
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(data, group=group),
        "broadcast": lambda: dist.broadcast(data, group_src=0, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, data, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(data, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    return calls[kind]


def bound(data: Tensor, size: int) -> Callable[[], None]:
    other, share = torch.zeros_like(data), max(1, data.numel() // size)

    def add_and_copy() -> None:
        torch.add(data[:share], other[:share], out=data[:share])
        data[share:].copy_(other[share:])

    return add_and_copy


class Bench:
    """The groups of one number of ranks."""

    def __init__(self, group: Group, against: list[str]):
        shoal.register_backend()
        self._group, self._against = group, against
        self._backend = dist.new_group(backend="shoal")

    def measure(self, kind: str, num_bytes: int, rounds: int) -> Any:
        """Median µs a call of every way, on rank 0."""
        data = torch.zeros(max(1, num_bytes // 4))
        whole = torch.zeros(data.numel() * self._group.size)
        ways: dict[str, Callable[[], Any]] = {
            "group": by_group(self._group, kind, data, whole),
            "backend": by_torch(self._backend, kind, data, whole),
        }
        if "gloo" in self._against:
            ways["gloo"] = by_torch(dist.group.WORLD, kind, data, whole)
        if kind == "all_reduce":
            ways["memory"] = bound(data, self._group.size)
        steps = self._steps(ways)
        times = alternate(ways, rounds, steps, lambda: self._group.barrier().wait())
        median_us = {name: statistics.median(values) * 1e3 for name, values in times.items()}
        return {"kind": kind, "ranks": self._group.size, "bytes": num_bytes, "median_us": median_us}

    def _steps(self, ways: dict[str, Callable[[], Any]]) -> int:
        """Calls a round, the same number on every rank; by the slowest way."""
        slowest_s = max(_seconds(way) for way in ways.values())
        steps = torch.tensor([int(min(200, max(1, _ROUND_S / slowest_s)))])
        self._group.broadcast(steps).wait()
        return int(steps)


def _seconds(way: Callable[[], Any]) -> float:
    way()
    start_s = time.perf_counter()
    way()
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", required=True)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--against", required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()

    def train(job: shoal.Job) -> None:
        torch.set_num_threads(1)
        bench = Bench(job.group, args.against.split(","))
        found = [
            bench.measure(kind, int(size), args.rounds)
            for kind in args.kinds.split(",")
            for size in args.sizes.split(",")
        ]
        if job.rank == 0:
            args.result.write_text(json.dumps(found))

    shoal.run(train)


if __name__ == "__main__":
    main()
