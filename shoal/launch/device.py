"""The device of a rank, and the backend of torch.distributed that serves it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shoal.errors import BadInput
from shoal.launch.environment import Placement


def choose_device(device: str | None, placement: Placement | None) -> torch.device:
    """The GPU of this rank, one that ranks share where there are too few, or the CPU."""
    chosen = asked_device(device)
    gpus = possible_gpus(device)
    if not gpus:
        return chosen
    chosen = gpus[_position(placement) % len(gpus)]
    torch.cuda.set_device(chosen)
    return chosen


def asked_device(device: str | None) -> torch.device:
    """As the user has named it, and as this host has it; without an index: whichever is free."""
    num_gpus = torch.cuda.device_count()
    name = device or ("cuda" if num_gpus else "cpu")
    try:
        asked = torch.device(name)
    except RuntimeError as error:
        raise BadInput(f"there is no device {name!r}: take cpu, cuda or cuda:N") from error
    if asked.type == "cuda" and not num_gpus:
        raise BadInput(f"device {name!r} was asked for, and PyTorch sees no CUDA GPU here")
    if asked.type == "cuda" and asked.index is not None and asked.index >= num_gpus:
        raise BadInput(f"device {name!r} was asked for, and there are {num_gpus} GPUs")
    return asked


def possible_gpus(device: str | None) -> list[torch.device]:
    """Those that `choose_device` chooses from, by the rank's number on its host."""
    chosen = asked_device(device)
    if chosen.type != "cuda":
        return []
    if chosen.index is not None:
        return [chosen]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _position(placement: Placement | None) -> int:
    """Among the ranks of this host; where that is not known, hosts are filled in order."""
    if placement is None:
        return 0
    return placement.local_rank if placement.knows_hosts else placement.rank


def choose_backend(device: torch.device, placement: Placement) -> str:
    """NCCL needs a GPU for each rank; Gloo serves CPUs, and ranks that share a GPU."""
    has_gpu_each = placement.has_gpu_each
    if has_gpu_each is None:
        has_gpu_each = placement.local_size <= torch.cuda.device_count()
    if device.type == "cuda" and has_gpu_each and dist.is_nccl_available():
        return "nccl"
    return "gloo"
