"""All-reduce between hosts: one rank of `shoal bench hosts`, which starts one on each host.

The schedules of `host_schedules` over Shoal's TCP transport, and Gloo.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.bench.alternate import Timing, alternate
from shoal.bench.host_schedules import GLOO, host_schedule
from shoal.comm.executors.scheduled.executor import Scheduled
from shoal.comm.group import Group
from shoal.comm.select import exchange_over
from shoal.runtime.parent_death import die_with_parent
from shoal.runtime.proof import fresh_nonce, proof
from shoal.schedules.collectives.cost import Link
from shoal.transport.tcp.connect import TcpSpec
from shoal.transport.tcp.transport import TcpEngine, TcpTransport

_TIMEOUT_S = 300.0


def ways_of(
    names: list[str], engine: TcpEngine, store: Store, rank: int, size: int, rack: int
) -> dict[str, Callable[[Tensor], None]]:
    def scheduled(name: str) -> Callable[[Tensor], None]:
        way = host_schedule(name, size, rack)
        transport = TcpTransport(engine, way.order, name, _TIMEOUT_S)
        group = Group(Scheduled(transport, lambda _: way.collective, Link()))
        return lambda data: group.all_reduce(data).wait()

    def gloo() -> Callable[[Tensor], None]:
        limit = timedelta(seconds=_TIMEOUT_S)
        group: Any = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, limit)
        return lambda data: group.allreduce([data]).wait()

    return {name: gloo() if name == GLOO else scheduled(name) for name in names}


def measure(options: argparse.Namespace) -> dict[str, Timing]:
    rank, size = options.rank, options.size
    store = dist.FileStore(options.store, size)  # type: ignore[attr-defined]
    exchange = exchange_over(PrefixStore("tcp", store), rank, size)
    key = proof(b"", "bench", *exchange(fresh_nonce().hex().encode()))
    engine = TcpEngine(TcpSpec(rank, size, key, host=options.address), exchange)
    try:
        data = torch.zeros(options.bytes // 4)
        names = options.ways.split(",")
        ways = ways_of(names, engine, store, rank, size, options.rack)
        meet = exchange_over(PrefixStore("rounds", store), rank, size)

        def begin() -> None:
            meet(b"begin")

        calls = {name: (lambda way=way: way(data)) for name, way in ways.items()}
        times_ms = alternate(calls, options.rounds, 1, begin)
        meet(b"end")
        return {name: Timing.of(rounds) for name, rounds in times_ms.items()}
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--rank", "--size", "--bytes", "--rounds", "--rack", "--parent"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--store", "--address", "--ways", "--result"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent)
    torch.set_num_threads(1)
    found = measure(options)
    if options.rank == 0:
        seconds = {
            name: {
                "median_s": t.median_ms / 1e3,
                "low_s": t.low_ms / 1e3,
                "high_s": t.high_ms / 1e3,
            }
            for name, t in found.items()
        }
        Path(options.result).write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
