"""All-reduce between the hosts of a lab: `python -m benchmarks hosts` starts a rank on each.

The schedules of `host_schedules` over Shoal's TCP transport, and Gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from benchmarks.harness import Timing, alternate, say
from benchmarks.host_schedules import GLOO, PLAIN, WITH_RACKS, host_schedule
from shoal.cluster.toml_file import read_cluster
from shoal.cluster.units import parse_bytes, show_bytes
from shoal.comm.executors.scheduled import Scheduled
from shoal.comm.group import Group
from shoal.comm.select import exchange_over
from shoal.comm.transport.tcp.connect import TcpSpec
from shoal.comm.transport.tcp.transport import TcpEngine, TcpTransport
from shoal.commands.output import plain_table
from shoal.errors import BadInput, ShoalError
from shoal.launch.lab.lab import Lab, LabHost, find_lab
from shoal.launch.lab.namespaces import require
from shoal.runtime.config import RunConfig
from shoal.runtime.files import scratch_folder
from shoal.runtime.lab_files import LabFiles
from shoal.runtime.parent_death import die_with_parent
from shoal.runtime.secret import code_of, fresh_nonce
from shoal.schedules.collectives.cost import Link

_TIMEOUT_S = 300.0


def ways_of(
    names: list[str], engine: TcpEngine, store: Store, rank: int, size: int, rack: int
) -> dict[str, Callable[[Tensor], None]]:
    def scheduled(name: str) -> Callable[[Tensor], None]:
        way = host_schedule(name, size, rack)
        transport = TcpTransport(engine, way.order, name, _TIMEOUT_S)
        group = Group(Scheduled(transport, {"all_reduce": lambda _: way.collective}, Link()))
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
    key = code_of(b"", "bench", *exchange(fresh_nonce().hex().encode()))
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


_LIMIT_S = 1800.0
_MOST_BYTES = 10_000_000_000


def run(lab_name: str | None, ranks: str, size: str, rounds: int) -> dict[str, Any]:
    lab = find_lab(lab_name)
    require()
    num_bytes = _size(size)
    cluster = read_cluster(LabFiles(lab.design.name).cluster)
    results = []
    for count in _counts(ranks, lab.design.hosts):
        ways = _ways(lab, count)
        say(f"measuring {', '.join(ways)} on {count} hosts")
        found = _run(lab, count, num_bytes, rounds, ways)
        bound_s = 2 * (count - 1) / count * num_bytes / cluster.node_bytes_per_s
        for way in ways:
            schedule = host_schedule(way, count, lab.design.hosts_per_rack)
            predicted_s = schedule.predicted_s(cluster, num_bytes)
            error = found[way]["median_s"] / predicted_s - 1
            row = {"way": way, "ranks": count, "bound_s": bound_s, "predicted_s": predicted_s}
            results.append({**row, "error": error, **found[way]})
    return {
        "lab": lab.design.name,
        "bytes": num_bytes,
        "bytes_per_s": cluster.node_bytes_per_s,
        "largest_error": max(abs(row["error"]) for row in results),
        "results": results,
    }


def _ways(lab: Lab, count: int) -> list[str]:
    has_racks = lab.design.racks > 1 and lab.design.hosts_per_rack > 1
    return [*PLAIN, *(WITH_RACKS if has_racks and count == lab.design.hosts else ())]


def _size(text: str) -> int:
    """Bytes of whole floats."""
    num_bytes = parse_bytes(text) // 4 * 4
    if not 4 <= num_bytes <= _MOST_BYTES:
        raise BadInput(
            f"--size {text[:40]}: from 4 bytes to {show_bytes(_MOST_BYTES)} are expected"
        )
    return num_bytes


def _counts(text: str, hosts: int) -> list[int]:
    words = text.split(",") if text else [str(hosts)]
    for word in words:
        if re.fullmatch("[0-9]{1,6}", word) is None or not 2 <= int(word) <= hosts:
            raise BadInput(f"--ranks {word[:40]}: a number of hosts from 2 to {hosts} is expected")
    return [int(word) for word in words]


def _run(lab: Lab, count: int, num_bytes: int, rounds: int, ways: list[str]) -> dict[str, Any]:
    with scratch_folder("bench") as folder:
        started = [
            _start(host, rank, count, num_bytes, rounds, ways, lab.design.hosts_per_rack, folder)
            for rank, host in enumerate(lab.hosts[:count])
        ]
        try:
            for process in started:
                if process.wait(_LIMIT_S):
                    raise ShoalError(f"a rank failed: {_last_line(process)}")
        finally:
            for process in started:
                with suppress(ProcessLookupError):
                    process.kill()
                process.wait()
                if process.stderr is not None:
                    process.stderr.close()
        found: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return found


def _start(
    host: LabHost, rank: int, count: int, num_bytes: int, rounds: int, ways: list[str], rack: int,
    folder: Path,
) -> subprocess.Popen[str]:  # fmt: skip
    values = {
        "rank": rank,
        "size": count,
        "bytes": num_bytes,
        "rounds": rounds,
        "rack": rack,
        "parent": os.getpid(),
        "store": folder / f"store-{count}",
        "address": host.address,
        "ways": ",".join(ways),
        "result": folder / "result.json",
    }
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    config = RunConfig.from_environment().with_environ(
        GLOO_SOCKET_IFNAME=host.device, OMP_NUM_THREADS="1"
    )
    return subprocess.Popen(
        host.namespace.command([sys.executable, "-m", "benchmarks.hosts", *words]),
        env=config.to_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _last_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    lines = process.stderr.read().strip().splitlines()
    return lines[-1][:300] if lines else f"exit status {process.returncode}"


def table_of(found: dict[str, Any]) -> Table:
    title = f"all-reduce of {show_bytes(found['bytes'])}, seconds (quartiles)"
    heads = ["ranks", "algorithm", "seconds", "predicted", "error", "2(p-1)/p V/B", "of it"]
    heads.append("of gloo")
    gloo = {r["ranks"]: r["median_s"] for r in found["results"] if r["way"] == "gloo"}
    rows = [
        [
            str(r["ranks"]),
            r["way"],
            f"{r['median_s']:.3f} ({r['low_s']:.3f}–{r['high_s']:.3f})",
            f"{r['predicted_s']:.3f}",
            f"{100 * r['error']:+.1f}%",
            f"{r['bound_s']:.3f}",
            f"{100 * r['bound_s'] / r['median_s']:.1f}%",
            f"{gloo[r['ranks']] / r['median_s']:.2f}x",
        ]
        for r in found["results"]
    ]
    return plain_table(title, heads, rows, left=2)


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
