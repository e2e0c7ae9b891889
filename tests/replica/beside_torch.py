"""One of two processes that compare a way of ours with torch.distributed's own, over Gloo."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.comm.executors.torch import Torch, join_world
from shoal.comm.group import Group


def main(compare: Callable[[Group], Mapping[str, float]]) -> None:
    """For `python -m … RANK SIZE FOLDER`: leaves what `compare` finds in FOLDER/RANK.json."""
    rank = int(sys.argv[1])
    size = int(sys.argv[2])
    folder = Path(sys.argv[3])
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    found: Mapping[str, object]
    try:
        found = compare(Group(Torch(join_world("", rank, size, "gloo"))))
    except Exception:
        found = {"error": traceback.format_exc()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
