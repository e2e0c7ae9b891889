"""The device of a rank, and the backend of torch.distributed that serves it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shoal.errors import BadInput
from shoal.launch.environment import Placement


def choose_device(device: str | None, placement: Placement | None) -> torch.device:
    """The GPU of this rank, one that ranks share where there are too few, or the CPU."""
    num_gpus = torch.cuda.device_count()
    name = device or ("cuda" if num_gpus else "cpu")
    try:
        chosen = torch.device(name)
    except RuntimeError as error:
        raise BadInput(f"there is no device {name!r}: take cpu, cuda or cuda:N") from error
    if chosen.type != "cuda":
        return chosen
    if not num_gpus:
        raise BadInput(f"device {name!r} was asked for, and PyTorch sees no CUDA GPU here")
    if chosen.index is None:
        chosen = torch.device("cuda", _position(placement) % num_gpus)
    if chosen.index is not None and chosen.index >= num_gpus:
        raise BadInput(f"device {name!r} was asked for, and there are {num_gpus} GPUs")
    torch.cuda.set_device(chosen)
    return chosen


def _position(placement: Placement | None) -> int:
    """Among the ranks of this host; where that is not known, hosts are filled in order."""
    if placement is None:
        return 0
    return placement.local_rank if placement.knows_hosts else placement.rank


def choose_backend(device: torch.device, placement: Placement) -> str:
    """NCCL needs a GPU for each rank; Gloo serves CPUs, and ranks that share a GPU."""
    has_gpu_each = placement.local_size <= torch.cuda.device_count()
    if device.type == "cuda" and has_gpu_each and dist.is_nccl_available():
        return "nccl"
    return "gloo"
