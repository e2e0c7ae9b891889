"""Synchronous, quorum, bounded staleness, asynchronous: which pushes a step waits for.

    ps                one update per step, with the gradients of all workers: the result of one
                      device. Under the others no step waits for all workers
    ps(quorum=q)      the update is the mean over the samples of the workers that pushed in time.
                      A step that the others have completed is skipped
    ps(staleness=k)   each push is applied at once, weighted with its share of the global batch:
                      the pushes of one step make up one synchronous step
    ps(mode="async")  the same without a bound. A worker that is far behind skips steps

In shared memory a pull is a copy, and is made after the push. Over a network the next weights are
pulled while backward runs, so they lack the push of that step (`PullAheadPs`).

Where no step waits for all workers, the loss is that of this worker's own samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, get_args, get_type_hints

import torch
from torch import Tensor

from shoal.comm.mesh import ReplicaGroup
from shoal.errors import ShoalError
from shoal.runtime.trace import WAIT
from shoal.server.client.client import Client, PendingPull, PullResult
from shoal.server.messages import Ack, Commit
from shoal.sync.ps.push import GradientPush, UpdateOnServers
from shoal.sync.ps.worker import PsContext, PsWorker, T

if TYPE_CHECKING:
    from shoal.sync.ps.worker import Leader, Pending


class RelaxedPs(PsWorker):
    """Pulls after each push, and uses the weights when the next step begins."""

    synchronous = False
    collects = False
    updates_here = False

    def __init__(
        self, context: PsContext, push: GradientPush, updates: UpdateOnServers, leader: Leader
    ):
        self._rule = context.rule
        self._pending: Pending | None = None
        self._fastest = 0  # the clock of the fastest worker, as of the latest pull
        self._in_step = False
        super().__init__(context, push, updates, leader)

    def begin(self) -> None:
        self._in_step = True
        self._receive()
        self._wait_settled()
        self.is_skipped = self._rule.is_too_late(self.update.steps, self._version, self._fastest)
        self.push.begin()

    def finish(self) -> None:
        step = self.update.steps
        ack = self._commit(step)
        if ack.verdict == "dropped":
            self.push.withdraw()
        self.client.settle(ack.position)
        self._pull_next(step)
        self.flat.zero_grad()
        self.updates.finish_step()
        if self.context.statistics is not None:
            self.context.statistics.keep()
        self._in_step = False

    def skip(self) -> Tensor:
        self.skipped += 1
        self.update.steps += 1
        self._in_step = False
        return self._loss.clone()

    def loss(self, local_loss: Tensor) -> Tensor:
        self._loss = local_loss / self.batch_fraction if self.batch_fraction else local_loss
        return self._loss.clone()

    def catch_up(self) -> None:
        step = self.update.steps
        self._pending = self._leader.pull(step, self._rule.version_for(step))
        self._receive()
        if self.context.statistics is not None:
            self.context.statistics.take()

    def _pull_next(self, step: int) -> None:
        self._pending = self._leader.pull(step + 1, self._rule.version_for(step + 1))

    def _receive(self) -> None:
        """Take the pull that is under way, if there is one."""
        if self._pending is None:
            return
        result = self._take(self._pending)
        self._pending = None
        self._fastest = result.fastest or 0

    def _wait_settled(self) -> None:
        with self._tracer.span(WAIT, "settle"):
            self.client.wait_settled()

    def _take_latest(self) -> None:
        self._receive()
        self._wait_settled()
        self._barrier()
        self._pull_latest()

    def _pull_latest(self) -> None:
        self._receive()
        self._pending = self._leader.pull(None, 0)
        self._receive()
        if self.context.servers.has_replicas:  # copies of other servers may lag behind
            self._pending = self._leader.pull(None, self._version)
            self._receive()

    def _on_lowest_survivor(self, action: Callable[[], T]) -> T | None:
        """Repeats if that worker was lost meanwhile: until all agree which one it is."""
        result = None
        actor = None
        while actor != self.lowest_survivor:
            actor = self.lowest_survivor
            if self._is_lowest_survivor:
                result = action()
            self._barrier()
        return result

    def _send_state(self) -> None:
        self._fastest = self.update.steps
        self._barrier()
        super()._send_state()

    def _leave(self) -> None:
        if self._in_step and self.context.replica.replica_group.size > 1:
            raise ShoalError("a step failed: the other workers of this replica may not end with it")
        self._pull_latest()
        super()._leave()


class PullAheadPs(RelaxedPs):
    """Pulls the weights of the next step while backward runs."""

    def reduce(self, bucket: slice) -> None:
        if self._pending is None:
            self._pending = self._leader.pull(self.update.steps + 1, 0)
        self.push.reduce(bucket)

    def _pull_next(self, step: int) -> None:
        return None


class SynchronousPs(PsWorker):
    """Every step waits for all workers; the loss is that of the global batch."""

    def __init__(
        self,
        context: PsContext,
        push: GradientPush,
        updates: UpdateOnServers,
        exchange_norm: Callable[[], None] | None = None,
    ):
        """`exchange_norm` gives the leader the norm to clip by, before it answers a commit."""
        self._exchange_norm = exchange_norm
        super().__init__(context, push, updates, context.client)

    def begin(self) -> None:
        self.push.begin()

    def finish(self) -> None:
        self.collect()
        self.updates.finish_step()

    def collect(self) -> None:
        step = self._pushes
        self._commit(step)
        result = self._take(self.client.pull(step + 1, step + 1))
        self._loss = result.loss_flags[0].to(self.flat.device)
        self._pushes += 1

    def loss(self, local_loss: Tensor) -> Tensor:
        return self._loss.clone()

    def _decide(self, commit: Commit, loss_flags: Tensor) -> Ack:
        return self.client.commit(commit, loss_flags, self._exchange_norm)

    def _take_latest(self) -> None:
        return None  # `finish` has taken it

    def _on_lowest_survivor(self, action: Callable[[], T]) -> T | None:
        return action() if self._is_lowest_survivor else None

    def _send_state(self) -> None:
        self._pushes = self.update.steps  # one a step, unless a loop collects several times
        super()._send_state()
        self._barrier()

    def state(self) -> dict[str, Tensor]:
        saved = super().state()
        if self.push.has_state:
            self._barrier()  # no worker leaves before its deposit was collected
        return saved


_VERDICTS = get_args(get_type_hints(Ack)["verdict"])


def exchange_norm(context: PsContext, is_unequal: bool) -> None:
    """Tell the leader of this shard the norm of the gradient over all shards.

    `is_unequal`: the servers of different shards may get different norms.
    """
    client = context.client
    total_norm = context.replica.update.grad_norm.over_replica
    assert total_norm is not None
    norms = {
        context.replica.flat.params[index]: torch.tensor(norm, dtype=torch.float64)
        for index, norm in client.norms().items()
    }
    total = total_norm.of(norms).view(1)
    if is_unequal:
        context.replica.replica_group.broadcast(total)
    client.set_norm(float(total))


class SharedLeader:
    """The leader of shard 0, as a worker of any shard of the replica uses it.

    Every shard stages its push with its own servers, which follow that leader. Then shard 0
    commits, and sends the decision to all shards; it pulls, and the others take weights that are
    at least as new. So a push counts in every shard or in none, and in the same order.
    """

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
