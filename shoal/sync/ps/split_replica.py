"""A replica that is split over workers (tp, pp): each worker has a shard, with its own servers.

Synchronous: the servers of each shard have a leader of their own. To clip by the norm of the full
gradient, the workers of replica 0 combine the norms of all shards (`NormExchange`).

Relaxed: the leader of shard 0 decides for all shards (`SharedLeader`).

    every shard    stages its push with its own servers, which follow the leader of shard 0
    barrier        all shards of the replica have staged
    shard 0        commits to the leader; sends its decision and log position to all shards
    shard 0        pulls from the leader, which holds the answer back as the rule says
    the others     take weights that are at least as new, and skip the same steps

So a push counts in every shard or in none, and every shard applies pushes in the same order.
Shards may have different versions in a step. Parameters that several shards hold are made equal
after each pull: the first shard's values count.
"""

from __future__ import annotations

from typing import get_args, get_type_hints

import torch
from torch import Tensor

from shoal.comm.mesh import ReplicaGroup
from shoal.server.client.client import Client, PendingPull, PullResult
from shoal.server.messages import Ack, Commit
from shoal.sync.ps.worker import PsContext

_VERDICTS = get_args(get_type_hints(Ack)["verdict"])


class NormExchange:
    """Tells the leader of this shard the norm of the gradient over all shards."""

    def __init__(self, context: PsContext, is_unequal: bool):
        """`is_unequal`: the servers of different shards may get different norms."""
        self._context = context
        self._is_unequal = is_unequal

    def __call__(self) -> None:
        client = self._context.client
        params = self._context.flat.params
        total_norm = self._context.update.grad_norm.over_replica
        assert total_norm is not None
        norms = {
            params[index]: torch.tensor(norm, dtype=torch.float64)
            for index, norm in client.norms().items()
        }
        total = total_norm.of(norms).view(1)
        if self._is_unequal:
            self._context.replica_group.broadcast(total)
        client.set_norm(float(total))


class SharedLeader:
    """The leader of shard 0, as a worker of any shard of the replica uses it."""

    def __init__(self, client: Client, replica_group: ReplicaGroup):
        self.client = client
        self.replica_group = replica_group
        self.lowest_survivor = 0

    def commit(self, commit: Commit, loss_flags: Tensor) -> Ack:
        self.client.stage(commit, loss_flags)
        self.replica_group.barrier()
        decision = [0, 0]
        if self.replica_group.is_leader:
            ack = self.client.decide(commit, loss_flags)
            decision = [_VERDICTS.index(ack.verdict), ack.position]
        verdict, position = self.replica_group.broadcast_integers(decision)
        return Ack(_VERDICTS[verdict], position)

    def pull(self, step: int | None, version: int) -> SharedPull:
        pending = self.client.pull(step, version) if self.replica_group.is_leader else None
        return SharedPull(self, pending)

    def barrier(self) -> None:
        self.replica_group.barrier()
        if self.replica_group.is_leader:
            self.client.barrier()
        (self.lowest_survivor,) = self.replica_group.broadcast_integers(
            [self.client.lowest_survivor]
        )

    def leave(self) -> None:
        """Shard 0 leaves last: its servers send the decisions to the others."""
        if self.replica_group.is_leader:
            self.replica_group.barrier()
        self.client.leave()
        self.lowest_survivor = self.client.lowest_survivor
        if not self.replica_group.is_leader:
            self.replica_group.barrier()


class SharedPull:
    """A pull by shard 0, which the other shards follow when it has arrived."""

    def __init__(self, leader: SharedLeader, pending: PendingPull | None):
        self._leader = leader
        self._pending = pending

    def wait(self) -> PullResult:
        pulled = None if self._pending is None else self._pending.wait()
        clocks = [0, 0, 0]
        if pulled is not None:
            clocks = [pulled.version, pulled.slowest or 0, pulled.fastest or 0]
        version, slowest, fastest = self._leader.replica_group.broadcast_integers(clocks)
        if pulled is None:
            pulled = self._leader.client.pull(None, version).wait()
        return PullResult(version, slowest, fastest, pulled.loss_flags)
