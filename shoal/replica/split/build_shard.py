"""This worker's shard of a replica, as the strategy splits the model.

What a strategy does not use is not imported: most runs split nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import checkpoint as checkpoints

from shoal.comm.mesh import Mesh
from shoal.errors import NotBuilt
from shoal.replica.deferred_init import DeferredInit, TensorSlot, with_values_of_rank_0
from shoal.replica.split.shard import ReplicaShard, TokenAxes, TokenAxis
from shoal.runtime.pytree import Tree
from shoal.strategy.split_terms import Tp
from shoal.strategy.strategy import Strategy

if TYPE_CHECKING:
    from shoal.replica.expert.mixtures import Mixture
    from shoal.replica.tensor.roles import Roles

Filled = Iterable[list[TensorSlot]]


class NotReentrant(checkpoints.CheckpointFunction):
    """Stands in for torch's own, of which `torch.utils.checkpoint` calls `apply`.

    A reentrant checkpoint (use_reentrant=True) hides a block from autograd and calls it again
    outside of the forward that it belongs to, where what a split forward needs (the calls of a
    stage, this worker's positions) is not there. So in a process that splits a model it is computed
    as one with use_reentrant=False: the same numbers.
    """

    @classmethod
    def apply(cls, function: Callable[..., Any], keeps_rng: bool, *args: Any) -> Any:
        return checkpoints.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=keeps_rng
        )


def replace_reentrant_checkpoints() -> None:
    checkpoints.CheckpointFunction = NotReentrant  # type: ignore[misc]
    # one that stops early would leave the random stream of a rank between a column and a row layer
    checkpoints._enable_checkpoint_early_stop = False


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
    if mesh.pp.size * mesh.ep.size * mesh.cp.size * mesh.tp.size > 1:
        replace_reentrant_checkpoints()
    pp = strategy.pp
    ep = strategy.ep if mesh.ep.size > 1 else None
    tp = strategy.tp if mesh.tp.size > 1 else None
    if tp is not None and tp.sequence and mesh.cp.size > 1:
        raise NotBuilt(
            f"{tp} + {strategy.cp} is not built: both divide the positions of a sequence; omit "
            "sequence=True"
        )
    mixtures: list[Mixture] = []
    if ep is not None:
        from shoal.replica.expert.mixtures import mixtures_for

        mixtures = mixtures_for(model, ep)
    roles = {} if tp is None else roles_of(model, tp, mixtures)
    if pp is not None and mesh.pp.size > 1:
        from shoal.replica.split.stage_shard import StageShard

        shard: ReplicaShard = StageShard(model, pp, mesh, device, deferred, example)
        filled: Filled = deferred.fill_in_turn(model, device)
    else:
        shard = ReplicaShard(model)
        filled = with_values_of_rank_0(deferred.fill_in_turn(model, device), mesh.world)
    shard.say = say
    expert_axis = TokenAxis(mesh.ep)
    if ep is not None and mixtures:
        from shoal.replica.expert.split import ExpertSplit

        experts = ExpertSplit(model, mixtures, mesh.ep, device, ep.capacity)
        shard.split_experts(experts)
        filled = experts.take(filled)
        expert_axis = TokenAxis(mesh.ep, experts.is_slice, has_slices=True)
    if tp is not None:
        from shoal.replica.tensor.parallelize import TensorSplit

        shard.split_tensors(TensorSplit(model, roles, mesh.tp, device, filled, tp.sequence))
    elif mesh.tp.size * mesh.ep.size * mesh.cp.size > 1:
        deque(filled, maxlen=0)  # all workers hold the values of rank 0
    if mesh.cp.size > 1:
        from shoal.replica.context.rules import sequence_context
        from shoal.replica.expert.forwards import compute_positions_here

        shard.split_sequences(sequence_context(mesh.cp.duplicate(), say))
        if not mixtures:
            compute_positions_here(model)
    shard.token_axes = TokenAxes(expert_axis, TokenAxis(mesh.cp))
    return shard


def roles_of(model: nn.Module, tp: Tp, mixtures: list[Mixture]) -> Roles:
    """Of layers that tp splits; experts of a list are complete on their worker."""
    from shoal.replica.expert.mixtures import in_listed_expert
    from shoal.replica.tensor.plan import plan_of

    roles = plan_of(model, tp)
    return {name: role for name, role in roles.items() if not in_listed_expert(name, mixtures)}
