"""What collectives cost: Shoal's group, its torch.distributed backend, Gloo, MPI, and a bound.

Run by `shoal bench collectives` in each of several workers (of mpirun, where MPI takes part). All
ways are measured alternately in the same processes, each for about the same time.
The bound is what an all-reduce cannot avoid: every rank adds its slice and copies the rest.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from shoal.bench.alternate import Timing, alternate
from shoal.comm.group import Group

KINDS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
_ROUND_S = 0.02  # one round of one way takes about this long


def by_group(group: Group, kind: str, data: Tensor, everything: Tensor) -> Callable[[], Any]:
    """One call; `data` has the requested bytes, `everything` as many for every rank."""
    other = everything.clone()
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: group.all_reduce(data).wait(),
        "broadcast": lambda: group.broadcast(data).wait(),
        "all_gather": lambda: group.all_gather(everything, data).wait(),
        "reduce_scatter": lambda: group.reduce_scatter(data, everything).wait(),
        "all_to_all": lambda: group.all_to_all(other, everything).wait(),
    }
    return calls[kind]


def by_torch(group: Any, kind: str, data: Tensor, everything: Tensor) -> Callable[[], Any]:
    other = everything.clone()
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(data, group=group),
        "broadcast": lambda: dist.broadcast(data, group_src=0, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(everything, data, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(data, everything, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, everything, group=group),
    }
    return calls[kind]


def bound(data: Tensor, size: int) -> Callable[[], None]:
    other = torch.zeros_like(data)
    slice_numel = max(1, data.numel() // size)

    def add_and_copy() -> None:
        torch.add(data[:slice_numel], other[:slice_numel], out=data[:slice_numel])
        data[slice_numel:].copy_(other[slice_numel:])

    return add_and_copy


def by_mpi(comm: Any, kind: str, data: Tensor, everything: Tensor) -> Callable[[], Any]:
    from mpi4py import MPI

    given = data.numpy()
    gathered = everything.numpy()
    other = everything.clone().numpy()
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, given),
        "broadcast": lambda: comm.Bcast(given),
        "all_gather": lambda: comm.Allgather(given, gathered),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(gathered, given),
        "all_to_all": lambda: comm.Alltoall(gathered, other),
    }
    return calls[kind]


def join_mpi() -> Any:
    """MPI's world; only the main thread calls it, so it needs no locks of its own."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    return MPI.COMM_WORLD


class Bench:
    """The groups of one number of ranks."""

    def __init__(self, group: Group, against: list[str]):
        shoal.register_backend()
        self._group = group
        self._against = against
        self._backend = dist.new_group(backend="shoal")
        self._mpi = join_mpi() if "mpi" in against else None

    def measure(self, kind: str, num_bytes: int, rounds: int) -> Any:
        """Median µs a call of every way and the quartiles around it, on rank 0."""
        data = torch.zeros(max(1, num_bytes // 4))
        everything = torch.zeros(data.numel() * self._group.size)
        ways: dict[str, Callable[[], Any]] = {
            "group": by_group(self._group, kind, data, everything),
            "backend": by_torch(self._backend, kind, data, everything),
        }
        if "gloo" in self._against:
            ways["gloo"] = by_torch(dist.group.WORLD, kind, data, everything)
        if self._mpi is not None:
            ways["mpi"] = by_mpi(self._mpi, kind, data, everything)
        if kind == "all_reduce":
            ways["memory"] = bound(data, self._group.size)
        calls = {name: self._calls(way) for name, way in ways.items()}
        times = alternate(ways, rounds, calls, lambda: self._group.barrier().wait())
        timings = {name: Timing.of(values) for name, values in times.items()}
        return {
            "kind": kind,
            "ranks": self._group.size,
            "bytes": num_bytes,
            "median_us": {name: t.median_ms * 1e3 for name, t in timings.items()},
            "quartiles_us": {
                name: [t.low_ms * 1e3, t.high_ms * 1e3] for name, t in timings.items()
            },
        }

    def _calls(self, way: Callable[[], Any]) -> int:
        """Calls a round, the same number on every rank."""
        calls = torch.tensor([int(min(500, max(1, _ROUND_S / _seconds(way))))])
        self._group.broadcast(calls).wait()
        return int(calls)


def _seconds(way: Callable[[], Any]) -> float:
    for _ in range(3):
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
        measurements = [
            bench.measure(kind, int(size), args.rounds)
            for kind in args.kinds.split(",")
            for size in args.sizes.split(",")
        ]
        if job.rank == 0:
            args.result.write_text(json.dumps(measurements))

    shoal.run(train)


if __name__ == "__main__":
    main()
