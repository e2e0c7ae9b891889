"""How `shoal bench collectives` starts its workers and prints the results."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from contextlib import suppress
from subprocess import PIPE
from typing import Any

from rich.table import Table

from shoal.cluster.units import parse_bytes, show_bytes
from shoal.commands.bench_harness import check_names, measure_in_workers, say
from shoal.commands.launching import config_for, run_quietly, strategy_for
from shoal.commands.output import plain_table, wide_console
from shoal.errors import BadInput, ShoalError
from shoal.runtime.config import RunConfig

KINDS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
PEERS = ("gloo", "mpi")
WAYS = ("group", "backend", *PEERS, "memory")
_CALL = ("collective", "ranks", "bytes")
_PATIENCE_S = 10.0


def measure(against: list[str], ranks: str, sizes: str, kinds: str, rounds: int) -> list[Any]:
    against = [peer for peer in against if peer]
    check_names("--against", against, PEERS)
    check_names("--kinds", kinds.split(","), KINDS)
    num_bytes = ",".join(str(parse_bytes(size)) for size in sizes.split(","))
    counts = [_count(text) for text in ranks.split(",")]
    against = _available(against)
    return [
        result for count in counts for result in _measure(count, against, num_bytes, kinds, rounds)
    ]


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 2:
        raise BadInput(f"{text!r} ranks cannot be compared: take numbers from 2, such as 2,4")
    return int(text)


def _measure(count: int, against: list[str], sizes: str, kinds: str, rounds: int) -> list[Any]:
    say(f"measuring {count} ranks")
    options = {"kinds": kinds, "sizes": sizes, "rounds": rounds, "against": ",".join(against)}
    config = config_for(strategy_for(None, count), device="cpu")
    run = _mpirun if "mpi" in against else run_quietly
    results: list[Any] = measure_in_workers("shoal.bench.collectives", options, count, config, run)
    return results


def _mpirun(command: list[str], count: int, config: RunConfig) -> None:
    """Start the workers as ranks of MPI, so that all peers are measured in the same processes."""
    start = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    words = [*start, "-n", str(count), *command]
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


def print_table(results: list[Any]) -> None:
    """Times, then their ratios: together they are wider than 80 columns."""
    console = wide_console()
    for table in tables(results):
        console.print(table)


def tables(results: list[Any]) -> list[Table]:
    found = [way for way in WAYS if any(way in r["median_us"] for r in results)]
    peers = [peer for peer in PEERS if peer in found]
    pairs = [(peer, way) for peer in peers for way in ("backend", "group")]
    pairs.append(("group", "memory"))
    times = plain_table("µs a call, medians", [*_CALL, *found], left=1)
    heads = [f"{one} /\n{other}" for one, other in pairs]
    ratios = plain_table("how many times as long", [*_CALL, *heads], left=1)
    for r in results:
        us = r["median_us"]
        call = [r["kind"], str(r["ranks"]), show_bytes(r["bytes"])]
        times.add_row(*call, *(f"{us[way]:,.1f}" if way in us else "" for way in found))
        ratios.add_row(*call, *(_ratio(us, *pair) for pair in pairs))
    return [times, ratios]


def _ratio(us: dict[str, float], one: str, other: str) -> str:
    return f"{us[one] / us[other]:.2f}" if one in us and other in us else ""
