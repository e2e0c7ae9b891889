"""This worker's shard of a replica, as the strategy splits the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import nn

from shoal.comm.mesh import Mesh
from shoal.errors import NotBuilt
from shoal.pytree import Tree
from shoal.replica.context.rules import sequence_context
from shoal.replica.deferred_init import DeferredInit, with_values_of_rank_0
from shoal.replica.expert.mixtures import in_listed_expert, mixtures_for
from shoal.replica.expert.split import ExpertSplit
from shoal.replica.expert.stacked import compute_positions_here
from shoal.replica.shard import ReplicaShard
from shoal.replica.stage_shard import StageShard
from shoal.replica.tensor.parallelize import TensorSplit
from shoal.replica.tensor.planning.plan import plan_of
from shoal.replica.token_axes import TokenAxes, TokenAxis
from shoal.strategy.strategy import Strategy


def build_shard(
    model: nn.Module,
    strategy: Strategy,
    mesh: Mesh,
    device: torch.device,
    deferred: DeferredInit,
    example: Tree = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> ReplicaShard:
    """This worker's shard of the model, which all have built; `example` are inputs of a batch.

    Stages and split layers are chosen while the model is complete. Tensors whose initialization
    is `deferred` are filled layer by layer, and those of other workers released.
    """
    _check_built(strategy)
    tp = strategy.tp
    pp = strategy.pp
    ep = strategy.ep
    mixtures = mixtures_for(model, ep) if ep is not None and mesh.ep.size > 1 else []
    roles = plan_of(model, tp) if tp is not None and mesh.tp.size > 1 else {}
    roles = {name: role for name, role in roles.items() if not in_listed_expert(name, mixtures)}
    expert_axis = TokenAxis(mesh.ep)
    if pp is not None and mesh.pp.size > 1:
        shard: ReplicaShard = StageShard(model, pp, mesh, device, deferred, example)
        filled = deferred.fill_in_turn(model, device)
    else:
        shard = ReplicaShard(model)
        filled = with_values_of_rank_0(deferred.fill_in_turn(model, device), mesh.world)
    shard.say = say
    if ep is not None and mixtures:
        experts = ExpertSplit(model, mixtures, mesh.ep, device, ep.capacity)
        shard.split_experts(experts)
        filled = experts.take(filled)
        expert_axis = TokenAxis(mesh.ep, experts.is_slice, has_slices=True)
    if tp is not None and mesh.tp.size > 1:
        shard.split_tensors(TensorSplit(model, roles, mesh.tp, device, filled, tp.sequence))
    elif mesh.tp.size * mesh.ep.size * mesh.cp.size > 1:
        deque(filled, maxlen=0)  # all workers hold the values of rank 0
    if mesh.cp.size > 1:
        shard.split_sequences(sequence_context(mesh.cp.duplicate(), say))
        if not mixtures:
            compute_positions_here(model)
    shard.token_axes = TokenAxes(expert_axis, TokenAxis(mesh.cp))
    return shard


def _check_built(strategy: Strategy) -> None:
    cp = strategy.cp
    if cp is None or cp.size == 1:
        return
    tp = strategy.tp
    if tp is not None and tp.size > 1 and tp.sequence:
        raise NotBuilt(
            f"{tp} + {cp} is not built: both divide the positions of a sequence; omit sequence=True"
        )
