"""MapReduce: workers map gradients over their samples, a master reduces them and updates.

    rank 0    gradient ─┐            ┌─ optimizer ─┐
    rank 1    gradient ─┼─ reduce ──▶│             ├── broadcast ──▶ all: the next step
    rank 2    gradient ─┘            └─────────────┘

Bulk synchronous: a step takes as long as its slowest worker. Workers of one host that share the
weights of a large model reduce and update a slice each (`shared_weights.py`).
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from shoal.schedules.buffer_layout import DEFAULT_BUCKET_BYTES
from shoal.schedules.steps.sums import MASTER
from shoal.strategy.sync_terms import Mapreduce
from shoal.sync import Replica, Sync, SyncPlan, runs
from shoal.sync.ddp import DdpSync, LocalSync
from shoal.sync.shared_weights import build_shared


class MapReduceSync(DdpSync):
    """Gradients are reduced to rank 0 while backward runs; it alone has an optimizer's state.

    A worker sends its gradients once in a step, and the weights go out from the master once.
    """

    def __init__(self, replica: Replica):
        super().__init__(replica, replica.flat.buckets(DEFAULT_BUCKET_BYTES))
        self._loss = self.flat.grads.header[:1].clone()
        self._exchange = partial(self.group.reduce, root=MASTER)

    def finish(self) -> None:
        self._wait()
        if self.group.rank == MASTER:
            self.flat.grads.publish()
            self.update.apply()
        self.flat.zero_grad()
        self._broadcast()

    def loss(self, local_loss: Tensor) -> Tensor:
        return self._loss[0].clone()

    def _broadcast(self) -> None:
        """The weights, and the loss: in the room for the header of the gradients."""
        self._loss.copy_(self.flat.grads.header[:1])
        if not self.flat.header_fits:
            self.group.broadcast(self._loss, MASTER).wait()
        else:
            self.flat.data[:1] = self._loss
        self.group.broadcast(self.flat.data, MASTER).wait()
        if self.flat.header_fits:
            self._loss.copy_(self.flat.data[:1])
            self.flat.data[:1] = 0.0


@runs(Mapreduce)
class MapReducePlan(SyncPlan[Mapreduce]):
    def why_not_scaled(self, replicas: int) -> str | None:
        if replicas > 1:
            return "the master alone knows the scale of the next step"
        return super().why_not_scaled(replicas)

    def build(self, replica: Replica) -> Sync:
        if replica.group.size == 1:
            return LocalSync(replica)
        buckets = replica.flat.buckets(DEFAULT_BUCKET_BYTES)
        shared = build_shared(replica, buckets, self.term.shared_weights)
        return shared or MapReduceSync(replica)
