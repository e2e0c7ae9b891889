"""ZeRO: every replica computes on its slice of the batch and owns a shard of the training state.

    backward     bucket full ─▶ reduced to the rank that owns its parameters
    update       each rank updates the parameters that it owns, with an optimizer of its own
    then         (1, 2) owners broadcast their parameters; (3) they are gathered when used

    kept by      parameters   gradients   optimizer state
    zero(1)      all          all         1/n
    zero(2)      all          1/n         1/n
    zero(3)      1/n          1/n         1/n

A shard is a run of whole parameters, so optimizers that look at a whole parameter (LAMB) work.
A step moves each gradient once and each parameter once (zero(3): twice), as ddp does in total.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.replica.deferred_init import DeferredInit
from shoal.replica.flat_params import FlatParams
from shoal.replica.fsdp.sharded_params import HeldShards, ShardedParams
from shoal.replica.split.shard import ReplicaShard
from shoal.schedules.buffer_layout import DEFAULT_BUCKET_BYTES
from shoal.strategy.sync_terms import Zero
from shoal.sync import Ownership, Replica, Sync, SyncPlan, runs
from shoal.sync.ddp_exact import exact_memory
from shoal.sync.memory import ModelSizes, SyncMemory
from shoal.sync.optimizer_step import GradNorm
from shoal.sync.zero_reduce import ZeroReduce
from shoal.sync.zero_update import ElasticUpdate, ExactZero, ShardedUpdate


def owned_params(flat: FlatParams, group: Group) -> list[tuple[str, nn.Parameter]]:
    """The parameters that this rank owns; none where there are more ranks than parameters."""
    shard = flat.shards(group.size)[group.rank]
    return [flat.named[i] for i in flat.params_in(shard)]


def sum_over_shards(flat: FlatParams, group: Group) -> Callable[[Tensor], Tensor]:
    """The sum of squares over all shards, from that of this one."""

    def over(squares: Tensor) -> Tensor:
        total = squares.to(flat.device)
        group.all_reduce(total).wait()
        return total

    return over


@runs(Zero)
class ZeroPlan(SyncPlan[Zero]):
    can_be_exact = True

    def shards_parameters(self, replicas: int) -> bool:
        return self.term.stage == 3 and (replicas > 1 or self.term.elastic)

    def layout(
        self, shard: ReplicaShard, dp: Group, device: torch.device, deferred: DeferredInit
    ) -> FlatParams:
        if not self.shards_parameters(dp.size):
            return super().layout(shard, dp, device, deferred)
        flat = ShardedParams(
            shard.model,
            dp,
            device,
            deferred,
            shard.named,
            shard.compute_module,
            self.term.shard_copies,
        )
        if shard.compute_module is None:  # else it is on the device, and the rest has no memory
            move_untrained(shard.model, flat, device)
        return flat

    def owns(self, flat: FlatParams, dp: Group, exact: bool) -> Ownership:
        held = HeldShards(flat, dp.rank, dp.size, self.term.shard_copies)
        named = [flat.named[i] for i in held.params]
        if exact:  # every rank has the full gradient
            return Ownership(named, GradNorm(params=flat.params))
        counted = [p for _, p in owned_params(flat, dp)] if self.term.elastic else None
        return Ownership(named, GradNorm(sum_over_shards(flat, dp), counted=counted))

    def memory(self, sizes: ModelSizes, rank: int, replicas: int) -> SyncMemory:
        plain = super().memory(sizes, rank, replicas)
        if sizes.exact_microbatches is not None:
            plain = exact_memory(plain, sizes, rank, replicas)
        else:
            shards = (rank, replicas, self.term.shard_copies)
            gradients = sizes.flat.zero_gradients(
                self.term.stage, shards, sizes.accumulates, sizes.is_stage
            )
            plain = replace(plain, gradients=int(gradients) * sizes.width)
        held = HeldShards(sizes.flat, rank, replicas, self.term.shard_copies)
        names = [sizes.flat.named[i][0] for i in held.params]
        plain = replace(plain, optimizer=sum(sizes.state[name] for name in names))
        if not self.shards_parameters(replicas):
            return plain
        parameters = held.size * sizes.width + sizes.untrained
        index = {name: i for i, (name, _) in enumerate(sizes.flat.named)}
        units = [[index[name] for name in unit] for unit in sizes.units]
        gathered = sizes.flat.gathered(units, set(held.params)) * sizes.width
        return replace(plain, parameters=parameters, gathered=gathered)

    def build(self, replica: Replica) -> Sync:
        sharded = (
            ElasticUpdate(replica, self.term.copies)
            if self.term.elastic
            else ShardedUpdate(replica)
        )
        if replica.exact_microbatches is not None:
            return ExactZero(replica, replica.exact_microbatches, DEFAULT_BUCKET_BYTES, sharded)
        return ZeroReduce(replica, self.term.stage, sharded)


def move_untrained(model: nn.Module, flat: FlatParams, device: torch.device) -> None:
    """Bring to the device what is not sharded: frozen parameters and buffers."""
    trained = {id(p) for p in flat.params}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None and id(p) not in trained and not p.is_meta:
                p.data = p.data.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
