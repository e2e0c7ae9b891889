"""One rank of a world of processes over Gloo: `python -m tests.comm.worker RANK SIZE FOLDER`.

Runs every case on the whole world, then on the pair of its last two ranks, and leaves what went
wrong in FOLDER/RANK.json: {"world": {case: None or a traceback}, "pair": {…}, …}. "messages" are
schedules over torch's messages.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.comm.executors.scheduled import Scheduled
from shoal.comm.executors.torch import Torch
from shoal.comm.group import Group
from shoal.schedules.collectives.cost import Link
from shoal.transport.transport import TorchTransport
from tests.comm.conformance import CASES, check

TIMEOUT = datetime.timedelta(seconds=30)


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=TIMEOUT
    )
    assert dist.group.WORLD is not None
    world = Group(Torch(dist.group.WORLD))
    report: dict[str, object] = {"world": outcomes(world)}
    pair = dist.new_group([size - 2, size - 1], timeout=TIMEOUT)
    if rank >= size - 2:
        report["pair"] = outcomes(Group(Torch(pair)))
    messages = Scheduled(TorchTransport(), link=Link(), background=True)
    report["messages"] = outcomes(Group(messages))
    report["wrong_size"] = error_of_a_wrong_size(world)
    world.barrier().wait()
    if rank == size - 1:
        write(report, rank, folder)
        os._exit(0)  # as if it had crashed: without a word to the others
    report["lost"] = error_of_a_lost_peer(world)
    write(report, rank, folder)
    os._exit(0)  # the world is broken: there is nothing to take down in order


def outcomes(group: Group) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name, case in CASES.items():
        try:
            check(case(group))
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
    return found


def error_of_a_wrong_size(group: Group) -> str:
    try:
        group.all_gather(torch.zeros(7), torch.zeros(3)).wait()
    except Exception as error:
        return type(error).__name__
    return "none"


def error_of_a_lost_peer(group: Group) -> list[str]:
    try:
        group.all_reduce(torch.zeros(3)).wait()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["none"]


def write(report: dict[str, object], rank: int, folder: Path) -> None:
    (folder / f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
