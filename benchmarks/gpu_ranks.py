"""Ranks of NCCL on a machine with fewer GPUs than ranks; for tests and benchmarks alone.

NCCL refuses two ranks on one GPU where they say that they are on one host. Here each says that it
is a host of its own, and they communicate over sockets. With a GPU for each rank nothing changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shoal.comm.group import Group
from shoal.comm.select import GroupSpec, open_group
from shoal.runtime.config import RunConfig
from shoal.worker import worker_group
from shoal.worker.environment import Placement, detect


def how_placed(size: int) -> str:
    """For the line above a table."""
    if torch.cuda.device_count() >= size:
        return f"{size} ranks, a GPU each"
    return f"{size} ranks share {torch.cuda.device_count()} GPU: NCCL goes over sockets"


def take_gpu(rank: int, size: int) -> torch.device:
    """The GPU of this rank; called before the first operation of NCCL."""
    gpus = torch.cuda.device_count()
    if gpus < size:
        of_sockets = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
        os.environ.update(of_sockets, NCCL_HOSTID=f"rank {rank}")
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    return device


@contextmanager
def gpu_group(rank: int, size: int, folder: Path) -> Iterator[Group]:
    """The group of ranks that meet in `folder`, over NCCL."""
    device = take_gpu(rank, size)
    spec = GroupSpec(
        rank=rank,
        size=size,
        init_method=f"file://{folder}/store",
        backend="nccl",
        name="gpus",
        is_one_host=True,
    )
    with open_group(spec) as group:
        group.executor.device = device
        yield group


def use_nccl() -> None:
    """For scripts: the workers of `shoal run` that share a GPU communicate over NCCL, too."""
    config = RunConfig.from_environment()
    placement = detect(config)
    if placement is None or placement.size <= torch.cuda.device_count():
        return
    take_gpu(placement.rank, placement.size)
    worker_group.choose_backend = _nccl


def _nccl(device: torch.device, placement: Placement) -> str:
    return "nccl" if device.type == "cuda" else "gloo"
