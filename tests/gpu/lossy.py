"""What the losses of a rank over NCCL look like: who says what, and when.

    python -m tests.gpu.lossy elastic     a killed rank of elastic runs, over NCCL and host memory
    python -m tests.gpu.lossy ends        kill, raise and stop of a rank of torchrun and shoal run

Prints what was said, the seconds from the loss to the first sentence and to the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys, time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal
from benchmarks.gpu_ranks import use_nccl

HOW, FOLDER, HOSTS, OVER = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def lose(job):
    (FOLDER / "lost").write_text(str(time.time()))
    if HOW == "raise":
        raise ValueError("a mistake of the script")
    if HOW in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if HOW == "kill" else signal.SIGSTOP)


def train(job):
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    data = TensorDataset(torch.randn(480, 64), torch.arange(480) % 10)
    step = job.step(
        nn.Sequential(*layers), F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.05)
    )
    for batch in job.batches(data, 24, epochs=1):
        if job.rank == 2 and job.steps == 6 and not (FOLDER / "lost").exists():
            lose(job)
        begun = time.time()
        loss = float(step(batch))
        took = time.time() - begun
        if job.is_first:
            group = job.group if job._elastic is None else job._elastic.group
            over = type(group.executor).__name__
            print(f"loss {job.steps} {loss!r} {over} {job.replicas} {took:.3f}", flush=True)


if __name__ == "__main__":
    if HOSTS > 1:
        os.environ["SHOAL_HOST_ID"] = f"host {int(os.environ['RANK']) % HOSTS}"
    if OVER == "nccl":
        use_nccl()
    shoal.run(train)
"""


@dataclass
class Ended:
    status: int | None
    losses: list[list[str]]
    said: list[tuple[float, str]]  # seconds after the loss
    ended_s: float
    lost_at: float
    left: list[int] = field(default_factory=list)

    def first_s(self, word: str) -> float | None:
        return next((at for at, line in self.said if word in line), None)


def run(how: str, *command: str, hosts: int = 1, over: str = "nccl", limit_s: float = 70.0,
        until: str = "", **env: str) -> Ended:  # fmt: skip
    """`until` a line with these words is seen, where the run does not end by itself."""
    with tempfile.TemporaryDirectory(prefix="shoal-lossy-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        words = [sys.executable, "-m", *command, str(folder / "train.py"), how, name]
        whole = {**os.environ, "PYTHONPATH": str(ROOT), **env}
        process = subprocess.Popen(
            [*words, str(hosts), over],
            cwd=name,
            env=whole,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        lines: list[tuple[float, str]] = []
        losses: list[list[str]] = []
        seen = threading.Event()

        def read(stream: Any) -> None:
            for line in stream:
                if "loss " in line and stream is process.stdout:
                    losses.append(line[line.index("loss ") :].split()[1:])
                elif line.strip():
                    lines.append((time.time(), line.rstrip()))
                if until and until in line:
                    seen.set()

        readers = [
            threading.Thread(target=read, args=(s,)) for s in (process.stdout, process.stderr)
        ]
        for reader in readers:
            reader.start()
        if until:
            seen.wait(limit_s)
            _end(process.pid)
        status: int | None = None
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(limit_s)
        ended = time.time()
        left = _of_session(process.pid)
        _end(process.pid)
        process.wait()
        for reader in readers:
            reader.join(5)
        lost_at = ended
        with suppress(OSError, ValueError):
            lost_at = float((folder / "lost").read_text())
        said = [(at - lost_at, line) for at, line in lines]
        return Ended(status, losses, said, ended - lost_at, lost_at, left)


def _of_session(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def _end(session: int) -> None:
    for pid in _of_session(session):
        with suppress(OSError):
            os.kill(pid, 9)


def torchrun(size: int) -> list[str]:
    return ["torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]


def shoal(size: int, strategy: str, *words: str) -> list[str]:
    return ["shoal", "run", "-n", str(size), "-s", strategy, "--device", "cuda", *words]


ELASTIC = ("ddp(elastic=True)", "zero(1, elastic=True)", "zero(3, elastic=True)",
           "localsgd(every=4, elastic=True)", "gossip(elastic=True)")  # fmt: skip


def elastic() -> None:
    def one(case: tuple[str, str]) -> Ended:
        return run("kill", *shoal(4, case[0]), over=case[1])

    cases = [(strategy, over) for strategy in ELASTIC for over in ("nccl", "host")]
    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(cases, pool.map(one, cases), strict=True))
    for strategy in ELASTIC:
        pair = [found[strategy, over] for over in ("nccl", "host")]
        numbers = [{int(words[0]): float(words[1]) for words in each.losses} for each in pair]
        apart = [abs(a - numbers[1].get(n, float("nan"))) for n, a in numbers[0].items()]
        print(f"\n{strategy}: status {[each.status for each in pair]}", end=" ")
        print(f"losses {[len(n) for n in numbers]}, apart {max(apart, default=-1):.2g}")
        for each in pair:
            shown = [words for words in each.losses if int(words[0]) in (6, 7, 8, 20)]
            print("  ", "; ".join(" ".join(words) for words in shown))
            _show(each, 14)


def ends() -> None:
    t = torchrun(4)
    ddp = {"SHOAL_STRATEGY": "ddp"}
    cases: dict[str, Any] = {
        "torchrun kill": lambda: run("kill", *t, **ddp),
        "torchrun raise": lambda: run("raise", *t, **ddp),
        "torchrun stop, limit 10": lambda: run("stop", *t, SHOAL_TIMEOUT="10", **ddp),
        "torchrun stop, no limit": lambda: run("stop", *t, until="has waited for", **ddp),
        "torchrun, 2 hosts, kill": lambda: run("kill", *t, hosts=2, **ddp),
        "torchrun, 2 hosts, raise": lambda: run("raise", *t, hosts=2, **ddp),
        "torchrun, 2 hosts, stop, limit 10": lambda: run(
            "stop", *t, hosts=2, SHOAL_TIMEOUT="10", **ddp
        ),
        "shoal run kill": lambda: run("kill", *shoal(4, "ddp")),
        "shoal run stop, limit 10": lambda: run("stop", *shoal(4, "ddp", "--timeout", "10")),
    }
    with ThreadPoolExecutor(3) as pool:
        futures = {name: pool.submit(case) for name, case in cases.items()}
    for name, future in futures.items():
        each: Ended = future.result()
        print(f"\n{name}: status {each.status}, ended {each.ended_s:.1f} s, left {each.left}")
        _show(each, 14)


def _show(each: Ended, most: int) -> None:
    for at, line in each.said[:most]:
        print(f"   {at:6.1f} {line[:330]}")
    if len(each.said) > most:
        print(f"   … {len(each.said) - most} more lines")


if __name__ == "__main__":
    {"elastic": elastic, "ends": ends}[sys.argv[1]]()
    with suppress(OSError):
        subprocess.run(["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv"])
