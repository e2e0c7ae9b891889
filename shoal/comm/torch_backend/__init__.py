"""Shoal as a torch.distributed backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def register() -> None:
    if not dist.is_available() or hasattr(dist.Backend, "SHOAL"):
        return
    dist.Backend.register_backend("shoal", _create, devices=["cpu", "cuda"])


@functools.cache
def _serve_by_name() -> None:
    """What torch asks by the name of a backend, from the first group of Shoal's on."""
    # torch's function checks for Gloo by name before it asks the group
    wider = _also_for_shoal(dist.monitored_barrier)
    dist.monitored_barrier = distributed_c10d.monitored_barrier = wider
    # DDP's compression in C++ takes futures of C++ only
    ddp = torch.nn.parallel.DistributedDataParallel
    ddp._register_builtin_comm_hook = _in_python_for_shoal(ddp._register_builtin_comm_hook)  # type: ignore[method-assign]


def _create(*args: Any) -> Any:
    from shoal.comm.torch_backend.process_group import create

    _serve_by_name()
    return create(*args)


def _also_for_shoal(torchs_own: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(torchs_own)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        chosen: Any = dist.group.WORLD if group is None else group
        if chosen not in (None, dist.GroupMember.NON_GROUP_MEMBER) and _is_ours(chosen):
            if isinstance(timeout, int | float):
                timeout = timedelta(seconds=timeout)
            chosen.monitored_barrier(timeout, wait_all_ranks)
        else:
            torchs_own(group, timeout, wait_all_ranks)

    return monitored_barrier


def _in_python_for_shoal(torchs_own: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(torchs_own)
    def _register_builtin_comm_hook(self: Any, comm_hook_type: Any) -> None:
        if comm_hook_type.name == "FP16_COMPRESS" and _is_ours(self.process_group):
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            self.register_comm_hook(self.process_group, fp16_compress_hook)
        else:
            torchs_own(self, comm_hook_type)

    return _register_builtin_comm_hook


def _is_ours(group: Any) -> bool:
    return dist.get_backend(group) == "shoal"
