"""The optimizer of the parameters that this worker owns, and whether it may see only those."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from shoal.comm.group import Group, Op
from shoal.comm.mesh import Mesh
from shoal.replica.optimizers import LooksAt, looks_at, refuse
from shoal.replica.shard import ReplicaShard
from shoal.sync.base import Ownership
from shoal.sync.optimizer_step import GradNorm, OptimizerStep
from shoal.train.options import StepFunctions, StepOptions
from shoal.train.step_context import StepContext

if TYPE_CHECKING:
    from shoal.sync.optimizer_step import SharedGradScaler


def build_optimizer(
    owned: Ownership,
    shard: ReplicaShard,
    functions: StepFunctions,
    options: StepOptions,
    context: StepContext,
) -> OptimizerStep:
    scales = options.precision == "fp16"
    shards = None if owned.grad_norm.over_shards is None else context.mesh.dp
    update = OptimizerStep(
        owned.named,
        functions.optimizer,
        clip_norm=options.clip_norm,
        grad_norm=replace(owned.grad_norm, over_replica=shard.total_norm(shards)),
        lr=functions.lr,
        scheduler=functions.scheduler,
        scaler=_grad_scaler(owned, context) if scales else None,
        tracer=context.tracer,
    )
    functions.check_optimizer(update.optimizer)
    check_pieces(update, shard, context)
    return update


def check_pieces(update: OptimizerStep, shard: ReplicaShard, context: StepContext) -> None:
    """Refuse an optimizer that looks at more than this worker has, on all workers alike."""
    groups = _sharing_groups(update.grad_norm, context.mesh)
    is_elastic = context.strategy.is_elastic and _is_sharded(update.grad_norm)
    if not groups and not is_elastic:
        return
    found = torch.zeros((), device=context.device)
    looks = looks_at(update.optimizer) if update.named else LooksAt.ELEMENT
    if looks is LooksAt.MODEL or shard.cut_dims():  # whole parameters are enough for others
        found += looks
    for group in groups:
        group.all_reduce(found, Op.MAX).wait()
    refuse(LooksAt(int(found)), type(update.optimizer).__name__, str(context.strategy))


def _grad_scaler(owned: Ownership, context: StepContext) -> SharedGradScaler:
    """Replicas agree where each of them updates a shard; else all have the same gradients."""
    from shoal.sync.optimizer_step import SharedGradScaler

    return SharedGradScaler(context.device, _sharing_groups(owned.grad_norm, context.mesh))


def _sharing_groups(norm: GradNorm, mesh: Mesh) -> list[Group]:
    """Groups whose workers update other parameters, or other slices of them."""
    groups = [mesh.tp, mesh.pp, mesh.ep, *([mesh.dp] if _is_sharded(norm) else [])]
    return [group for group in groups if group.size > 1]


def _is_sharded(norm: GradNorm) -> bool:
    """Whether each replica updates a shard."""
    return norm.over_shards is not None or norm.params is not None
