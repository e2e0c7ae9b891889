"""What collectives cost: Shoal's group, its torch.distributed backend, Gloo, MPI, and a bound.

`python -m benchmarks collectives` starts several workers (of mpirun, where MPI takes part). All
ways are measured alternately in the same processes, each for about the same time.
The bound is what an all-reduce cannot avoid: every rank adds its slice and copies the rest.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from subprocess import PIPE
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

import shoal
from benchmarks.harness import (
    Timing,
    alternate,
    check_names,
    measure_in_workers,
    options_of_worker,
    say,
    write_result,
)
from shoal.cluster.units import parse_bytes, show_bytes
from shoal.comm.group import Group
from shoal.commands.launching import config_for, run_quietly, strategy_for
from shoal.commands.output import plain_table
from shoal.errors import BadInput, ShoalError
from shoal.runtime.config import RunConfig

KINDS = (
    *("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"),
    *("reduce", "gather", "scatter", "scan"),
)
PEERS = ("gloo", "mpi")
WAYS = ("group", "backend", *PEERS, "memory")
_ROUND_S = 0.02  # one round of one way takes about this long


def by_group(group: Group, kind: str, data: Tensor, everything: Tensor) -> Callable[[], Any]:
    """One call; `data` has the requested bytes, `everything` as many for every rank."""
    other = everything.clone()
    of_root = everything if group.rank == 0 else None
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: group.all_reduce(data).wait(),
        "broadcast": lambda: group.broadcast(data).wait(),
        "all_gather": lambda: group.all_gather(everything, data).wait(),
        "reduce_scatter": lambda: group.reduce_scatter(data, everything).wait(),
        "all_to_all": lambda: group.all_to_all(other, everything).wait(),
        "reduce": lambda: group.reduce(data).wait(),
        "gather": lambda: group.gather(of_root, data).wait(),
        "scatter": lambda: group.scatter(data, of_root).wait(),
        "scan": lambda: group.scan(data).wait(),
    }
    return calls[kind]


def by_torch(group: Any, kind: str, data: Tensor, everything: Tensor) -> Callable[[], Any]:
    """As `by_group`; torch has no scan."""
    other = everything.clone()
    is_root = dist.get_rank(group) == 0
    pieces = list(everything.view(-1, data.numel())) if is_root else None
    to_root: dict[str, Any] = {"group": group, "group_dst": 0}
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(data, group=group),
        "broadcast": lambda: dist.broadcast(data, group_src=0, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(everything, data, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(data, everything, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, everything, group=group),
        "reduce": lambda: dist.reduce(data, **to_root),
        "gather": lambda: dist.gather(data, pieces, **to_root),
        "scatter": lambda: dist.scatter(data, pieces, group_src=0, group=group),
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
    of_root = gathered if comm.rank == 0 else None
    summed = MPI.IN_PLACE if comm.rank == 0 else given
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, given),
        "broadcast": lambda: comm.Bcast(given),
        "all_gather": lambda: comm.Allgather(given, gathered),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(gathered, given),
        "all_to_all": lambda: comm.Alltoall(gathered, other),
        "reduce": lambda: comm.Reduce(summed, given if comm.rank == 0 else None),
        "gather": lambda: comm.Gather(given, of_root),
        "scatter": lambda: comm.Scatter(of_root, given),
        "scan": lambda: comm.Scan(MPI.IN_PLACE, given),
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
            "group": by_group(self._group, kind, data, everything)
        }
        if kind != "scan":
            ways["backend"] = by_torch(self._backend, kind, data, everything)
        if "gloo" in self._against and kind != "scan":
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


_CALL = ("collective", "ranks", "bytes")
_PATIENCE_S = 10.0


def run(against: list[str], ranks: str, sizes: str, kinds: str, rounds: int) -> list[Any]:
    against = [peer for peer in against if peer]
    check_names("--against", against, PEERS)
    check_names("--kinds", kinds.split(","), KINDS)
    num_bytes = ",".join(str(parse_bytes(size)) for size in sizes.split(","))
    counts = [_count(text) for text in ranks.split(",")]
    against = _available(against)
    return [result for count in counts for result in _run(count, against, num_bytes, kinds, rounds)]


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 2:
        raise BadInput(f"{text!r} ranks cannot be compared: take numbers from 2, such as 2,4")
    return int(text)


def _run(count: int, against: list[str], sizes: str, kinds: str, rounds: int) -> list[Any]:
    say(f"measuring {count} ranks")
    options = {"kinds": kinds, "sizes": sizes, "rounds": rounds, "against": ",".join(against)}
    config = config_for(strategy_for(None, count), device="cpu")
    start = _mpirun if "mpi" in against else run_quietly
    results: list[Any] = measure_in_workers("benchmarks.collectives", options, count, config, start)
    return results


def _mpirun(command: list[str], count: int, config: RunConfig) -> None:
    """Start the workers as ranks of MPI, so that all peers are measured in the same processes."""
    launch = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    words = [*launch, "-n", str(count), *command]
    streams: dict[str, Any] = {"stdout": PIPE, "stderr": PIPE, "text": True}
    # in a session of its own: hit by Ctrl-C and SIGTERM at once it would not free shared memory
    with subprocess.Popen(
        words, env=config.to_environment(), start_new_session=True, **streams
    ) as mpi:
        try:
            _, stderr = mpi.communicate()
        except BaseException:
            mpi.terminate()  # given some time, it ends its ranks and frees their memory
            with suppress(subprocess.TimeoutExpired):
                mpi.wait(_PATIENCE_S)
            mpi.kill()
            raise
    if mpi.returncode:
        raise ShoalError(f"mpirun failed: {stderr.strip()[-500:]}")


def _available(against: list[str]) -> list[str]:
    """Without MPI where it is not installed, which is printed."""
    missing = next((what for what, there in _needs().items() if not there), None)
    if "mpi" not in against or missing is None:
        return against
    say(f"mpi is not measured: there is no {missing} here")
    return [peer for peer in against if peer != "mpi"]


def _needs() -> dict[str, bool]:
    return {
        "mpirun": shutil.which("mpirun") is not None,
        "mpi4py": importlib.util.find_spec("mpi4py") is not None,
    }


def tables(results: list[Any]) -> list[Table]:
    """Times, then their ratios: together they are wider than 80 columns."""
    found = [way for way in WAYS if any(way in r["median_us"] for r in results)]
    peers = [peer for peer in PEERS if peer in found]
    pairs = [(peer, way) for peer in peers for way in ("backend", "group")]
    pairs.append(("group", "memory"))
    times = []
    ratios = []
    for r in results:
        us = r["median_us"]
        call = [r["kind"], str(r["ranks"]), show_bytes(r["bytes"])]
        times.append([*call, *(f"{us[way]:,.1f}" if way in us else "" for way in found)])
        ratios.append([*call, *(_ratio(us, *pair) for pair in pairs)])
    heads = [f"{one} /\n{other}" for one, other in pairs]
    return [
        plain_table("µs a call, medians", [*_CALL, *found], times, left=1),
        plain_table("how many times as long", [*_CALL, *heads], ratios, left=1),
    ]


def _ratio(us: dict[str, float], one: str, other: str) -> str:
    return f"{us[one] / us[other]:.2f}" if one in us and other in us else ""


def main() -> None:
    args = options_of_worker(kinds=str, sizes=str, rounds=int, against=str)

    def measure(job: shoal.Job) -> list[Any]:
        torch.set_num_threads(1)
        bench = Bench(job.group, args.against.split(","))
        return [
            bench.measure(kind, int(size), args.rounds)
            for kind in args.kinds.split(",")
            for size in args.sizes.split(",")
        ]

    write_result(measure, args.result)


if __name__ == "__main__":
    main()
