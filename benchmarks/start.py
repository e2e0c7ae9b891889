"""How long workers of this host take to their first step, and to the end of four steps.

Every way is a command of its own; commands take turns, `rounds` times. The time of `import torch`
alone stands beside: no way could take less. Processor time is that of all processes of a command.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks.harness import Timing, say, spread
from shoal.commands.output import plain_table
from shoal.errors import ShoalError
from shoal.runtime.files import scratch_folder
from shoal.runtime.memory_limit import cores

SCRIPT = str(Path(__file__).with_name("start_worker.py"))
IMPORT, PLAIN = "import torch", "python"
METHODS = ("fork", "spawn")


class StartWay(NamedTuple):
    name: str
    workers: int

    def command(self, file: Path) -> list[str]:
        count = str(self.workers)
        if self.name == IMPORT:
            return [sys.executable, "-c", IMPORT]
        if self.name == PLAIN:
            return [sys.executable, SCRIPT, "plain", str(file)]
        if self.name == "torchrun":
            words = ["torch.distributed.run", "--standalone", "--nproc-per-node", count]
            return [sys.executable, "-m", *words, SCRIPT, "torchrun", str(file)]
        words = ["shoal", "run", "-n", count, "--device", "cpu", "--start-method", self.name]
        return [sys.executable, "-m", *words, SCRIPT, "shoal", str(file)]


def ways_of(workers: Sequence[int]) -> list[StartWay]:
    many = [StartWay(name, n) for n in workers for name in ("torchrun", *METHODS)]
    return [StartWay(IMPORT, 1), StartWay(PLAIN, 1), *many]


def run(workers: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Of each way the seconds of its rounds."""
    ways = ways_of(workers)
    found: dict[StartWay, list[tuple[float, float, float]]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 else reversed(ways):
            say(f"round {number + 1}: {way.name} on {way.workers}")
            found[way].append(measure(way))
    results: list[dict[str, Any]] = []
    for way, times in found.items():
        first, whole, cpu = ([*each] for each in zip(*times, strict=True))
        of_way = {"way": way.name, "workers": way.workers, "whole_s": whole, "cpu_s": cpu}
        results.append({**of_way, "first_step_s": None if way.name == IMPORT else first})
    for result in results:
        peer = [r for r in results if (r["way"], r["workers"]) == ("torchrun", result["workers"])]
        if result["way"] in METHODS:
            pairs = zip(result["first_step_s"], peer[0]["first_step_s"], strict=True)
            result["to_torchrun"] = [ours / theirs for ours, theirs in pairs]
    return results


def measure(way: StartWay) -> tuple[float, float, float]:
    """Seconds to the first step of the last worker, to the end, and of the processors."""
    with scratch_folder("bench") as folder:
        file = folder / "first"
        threads = {"OMP_NUM_THREADS": str(max(1, cores() // way.workers))}
        env = {**os.environ, **threads, "CUDA_VISIBLE_DEVICES": ""}
        env.pop("SHOAL_START_METHOD", None)
        before_s, start_s = _cpu_s(), time.clock_gettime(time.CLOCK_MONOTONIC)
        done = subprocess.run(way.command(file), env=env, capture_output=True, text=True)
        whole_s = time.clock_gettime(time.CLOCK_MONOTONIC) - start_s
        if done.returncode:
            raise ShoalError(f"{way.name} on {way.workers} failed:\n{done.stderr}")
        ends = [float(line) for line in file.read_text().split()] if file.exists() else []
    return max(ends, default=start_s) - start_s, whole_s, _cpu_s() - before_s


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    heads = ["", "workers", "first step\ns", "whole\ns", "processors\ns", "to\ntorchrun"]
    keys = ("first_step_s", "whole_s", "cpu_s", "to_torchrun")
    rows = []
    for result in results:
        name = f"shoal, {result['way']}" if result["way"] in METHODS else result["way"]
        rows.append([name, str(result["workers"]), *(_cell(result.get(key)) for key in keys)])
    return plain_table("four steps of a small model: median (quartiles)", heads, rows, left=1)


def _cell(rounds: Sequence[float] | None) -> str:
    return "" if rounds is None else spread(asdict(Timing.of([*rounds])), "_ms")
