"""Seconds to save and to load a model: Shoal, torch.save, torch.distributed.checkpoint, in turns.

All of them are durable before they count as saved. `held` is how long the call keeps training from
going on; `done` is when the checkpoint is complete. Nothing trains meanwhile. What disk and memory
allow: dd with conv=fsync, and a copy in memory. All write new files: what a file system takes to
free those of the round before, as long as to write them, counts for none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import shoal
from benchmarks.harness import Timing, measure_in_workers, say, spread, worker_parser, write_result
from shoal.commands.launching import config_for, strategy_for
from shoal.commands.output import plain_table
from shoal.runtime.checkpoint_folders import removals, sync_path
from shoal.runtime.files import scratch_folder

_WIDTH = 2048
DISK, MEMORY = "dd conv=fsync", "copy in memory"
Way = Callable[[], tuple[float, float]]  # seconds until the call returns, and until all is done


def _timed(
    call: Callable[[], Any],
    then: Callable[[Any], Any] = lambda result: None,
    target: Path | None = None,
) -> Way:
    """`target` is removed before, if it is there."""

    def run() -> tuple[float, float]:
        removals.join()  # of what Shoal has replaced
        if target is not None and target.exists():
            target.unlink() if target.is_file() else shutil.rmtree(target)
        os.sync()
        start_s = time.perf_counter()
        result = call()
        held_s = time.perf_counter() - start_s
        then(result)
        return held_s, time.perf_counter() - start_s

    return run


def _model(num_bytes: int) -> nn.Module:
    layers = max(1, round(num_bytes / (4 * _WIDTH * (_WIDTH + 1))))
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))


def _dd(source: str, target: Path | str, num_bytes: int, *words: str) -> None:
    count = f"count={max(1, num_bytes >> 20)}"
    command = ["dd", f"if={source}", f"of={target}", "bs=1M", count, *words]
    subprocess.run(command, check=True, capture_output=True)


def _torch_save(model: nn.Module, file: Path) -> None:
    torch.save(model.state_dict(), file)
    sync_path(file)


def _torch_load(model: nn.Module, file: Path, mmap: bool) -> None:
    model.load_state_dict(torch.load(file, mmap=mmap))


def _dcp_load(model: nn.Module, folder: Path) -> None:
    state = model.state_dict()  # its tensors are filled in place
    load(state, checkpoint_id=folder)


def _ways(job: shoal.Job, model: nn.Module, folder: Path) -> tuple[dict[str, Way], dict[str, Way]]:
    """What saves, and what loads."""
    peer = _model(num_bytes_of(model))
    num_bytes = num_bytes_of(model)
    tensors = [p.detach() for p in model.parameters()]
    file, dcp = folder / "torch.pt", folder / "dcp"
    finish = job.checkpoints.finish
    saves = {
        DISK: _timed(
            lambda: _dd("/dev/zero", folder / "dd", num_bytes, "conv=fsync"), target=folder / "dd"
        ),
        MEMORY: _timed(lambda: [tensor.clone() for tensor in tensors]),
        "shoal": _timed(partial(job.save, folder / "shoal")),
        "shoal, wait=False": _timed(
            partial(job.save, folder / "shoal", wait=False), lambda _: finish()
        ),
        "torch.save": _timed(partial(_torch_save, peer, file), target=file),
        "dcp.save": _timed(lambda: save(peer.state_dict(), checkpoint_id=dcp), target=dcp),
        "dcp.async_save": _timed(
            lambda: async_save(peer.state_dict(), checkpoint_id=dcp),
            lambda future: future.result(),
            dcp,
        ),
    }
    loads = {
        "dd to /dev/null": _timed(lambda: _dd(str(folder / "dd"), "/dev/null", num_bytes)),
        MEMORY: saves[MEMORY],
        "shoal": _timed(partial(job.load, folder / "shoal")),
        "torch.load": _timed(partial(_torch_load, peer, file, False)),
        "torch.load, mmap": _timed(partial(_torch_load, peer, file, True)),
        "dcp.load": _timed(partial(_dcp_load, peer, dcp)),
    }
    return saves, loads


def num_bytes_of(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def measure(job: shoal.Job, num_bytes: int, rounds: int, parent: Path | None) -> dict[str, Any]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    model = _model(num_bytes)
    job.step(model, nn.functional.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.1))
    found: dict[str, dict[str, list[tuple[float, float]]]] = {"save": {}, "load": {}}
    with scratch_folder("bench", None if parent is None else str(parent)) as folder:
        kinds = dict(zip(("save", "load"), _ways(job, model, folder), strict=True))
        for number in range(rounds + 1):  # the first one is not counted
            for kind, ways in kinds.items():
                for name, way in list(ways.items())[:: 1 if number % 2 else -1]:
                    seconds = way()
                    found[kind].setdefault(name, []).extend([seconds] if number else [])
    dist.destroy_process_group()
    return {"bytes": num_bytes_of(model), **found}


def run(num_bytes: int, rounds: int, folder: Path | None) -> Any:
    say(f"saving and loading {num_bytes / 1e6:.0f} MB")
    asked: dict[str, object] = {"bytes": num_bytes, "rounds": rounds}
    asked["folder"] = folder.absolute() if folder else ""
    config = config_for(strategy_for("single", 1), device="cpu")
    return measure_in_workers("benchmarks.checkpoint", asked, 1, config)


def tables(found: dict[str, Any]) -> list[Table]:
    titles = {"save": "to save", "load": "to load"}
    return [_table(found[kind], found["bytes"], title, kind) for kind, title in titles.items()]


def _table(ways: dict[str, Any], num_bytes: int, title: str, kind: str) -> Table:
    heads = ["", "held\ns", "done\ns", "MB/s", f"{DISK} /\ndone"]
    rows = []
    for name, times in ways.items():
        held, done = ([*each] for each in zip(*times, strict=True))
        to_disk: Sequence[float] = []
        if kind == "save" and name != MEMORY:
            limit = [seconds for _, seconds in ways[DISK]]
            to_disk = [disk / ours for disk, ours in zip(limit, done, strict=True)]
        rate = [num_bytes / 1e6 / seconds for seconds in done]
        rows.append([name, *(_cell(each) for each in (held, done, rate, to_disk))])
    if kind == "load":
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    size = f"{num_bytes / 1e6:.0f} MB"
    return plain_table(f"seconds {title} {size}: median (quartiles)", heads, rows, left=1)


def _cell(rounds: Sequence[float]) -> str:
    return spread(asdict(Timing.of([*rounds])), "_ms") if rounds else ""


if __name__ == "__main__":
    args = worker_parser(bytes=int, rounds=int, folder=str).parse_args()
    parent = Path(args.folder) if args.folder else None
    write_result(lambda job: measure(job, args.bytes, args.rounds, parent), args.result)
