"""The same collectives through mpi4py; run by mpirun for `shoal bench collectives`."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]

_ROUND_S = 0.02


def call(comm: Any, kind: str, numel: int) -> Callable[[], Any]:
    data, whole = np.zeros(numel, np.float32), np.zeros(numel * comm.size, np.float32)
    other = whole.copy()
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, data),
        "broadcast": lambda: comm.Bcast(data),
        "all_gather": lambda: comm.Allgather(data, whole),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(whole, data),
        "all_to_all": lambda: comm.Alltoall(whole, other),
    }
    return calls[kind]


def median_us(comm: Any, way: Callable[[], Any], rounds: int) -> float:
    def seconds(steps: int) -> float:
        comm.Barrier()
        start_s = time.perf_counter()
        for _ in range(steps):
            way()
        return (time.perf_counter() - start_s) / steps

    seconds(1)
    steps = comm.bcast(int(min(200, max(1, _ROUND_S / seconds(1)))))
    return statistics.median(seconds(steps) for _ in range(rounds)) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", required=True)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    found = [
        median_us(comm, call(comm, kind, max(1, int(size) // 4)), args.rounds)
        for kind in args.kinds.split(",")
        for size in args.sizes.split(",")
    ]
    if comm.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
