"""Checks before the first step that all workers have the same proven schedule of the user's."""

from __future__ import annotations

import torch

from shoal.comm.group import Group
from shoal.comm.mesh import Mesh
from shoal.comm.objects import all_gather_bytes
from shoal.errors import BadInput
from shoal.schedules.user import is_user_function
from shoal.strategy.strategy import Strategy


def check_user_schedules(
    strategy: Strategy, mesh: Mesh, microbatches: int, device: torch.device
) -> None:
    """Load and prove the schedules that `strategy` names as FILE.py:FUNCTION.

    All ranks call it. A schedule that the proof rejects, or that differs between ranks, is a
    `BadInput`.
    """
    algorithm = strategy.sync_for(mesh.dp.size).collective_algorithm
    if mesh.dp.size > 1 and algorithm is not None and is_user_function(algorithm):
        from shoal.schedules.user_proof import digest, proven_collective

        collective = proven_collective(algorithm, "all_reduce", mesh.dp.size)
        check_same(mesh.world, algorithm, digest(collective), device)
    pp = strategy.pp
    if pp is not None and pp.size > 1 and is_user_function(pp.schedule):
        from shoal.schedules.user_proof import digest, proven_pipeline

        pipeline = proven_pipeline(pp.schedule, pp.size, microbatches, pp.chunks)
        check_same(mesh.world, pp.schedule, digest(pipeline), device)


def check_same(world: Group, name: str, schedule_digest: bytes, device: torch.device) -> None:
    """Compare the digests of all ranks; one small all-gather."""
    digests = all_gather_bytes(world, schedule_digest, device=device)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        ranks = " and ".join(map(str, others))
        plural = "s" if len(others) > 1 else ""
        raise BadInput(
            f"{name} is another schedule on rank{plural} {ranks} than on rank 0: give every "
            "worker the same file, with a function that depends on its arguments only"
        )
