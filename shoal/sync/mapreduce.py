"""MapReduce: workers map gradients over their samples, a master reduces them and updates.

    rank 0    gradient ─┐            ┌─ optimizer ─┐
    rank 1    gradient ─┼─ reduce ──▶│             ├── broadcast ──▶ all: the next step
    rank 2    gradient ─┘            └─────────────┘

Bulk synchronous: a step takes as long as its slowest worker.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.comm.counting import CountingGroup
from shoal.comm.group import Group
from shoal.errors import BadInput
from shoal.replica.flat_params import FlatParams
from shoal.sync.base import Sync
from shoal.sync.optimizer_step import Update
from shoal.sync.traffic import Traffic
from shoal.transport.transport import Work

MASTER = 0


class MapReduce(Sync):
    """Gradients are reduced to rank 0 while backward runs; it alone has an optimizer's state.

    A worker sends its gradients once in a step, and the weights go out from the master once.
    """

    def __init__(self, flat: FlatParams, update: Update, group: Group, bucket_bytes: int):
        if update.scaler is not None:
            raise BadInput(
                'mapreduce and precision="fp16" exclude each other: the master alone knows the '
                'scale of the next step; take precision="bf16"'
            )
        self.flat = flat
        self.update = update
        self.group = CountingGroup(group)
        self.traffic = Traffic(flat, self.group)
        self._under_way: list[Work] = []
        self._loss = flat.head[:1].clone()
        flat.watch(flat.buckets(bucket_bytes))

    def begin(self) -> None:
        self._under_way.clear()

    def reduce(self, bucket: slice) -> None:
        self._under_way.append(self.group.reduce(self.flat.grad[bucket], MASTER))
        if self.flat.head_travels_alone and bucket.start == 0:
            self._under_way.append(self.group.reduce(self.flat.head, MASTER))

    def finish(self) -> None:
        for work in self._under_way:
            work.wait()
        self.traffic.steps += 1
        if self.group.rank == MASTER:
            self.flat.publish()
            self.update.apply()
        self.flat.drop_gradients()
        self._broadcast()

    def loss(self, part: Tensor) -> Tensor:
        return self._loss[0].clone()

    def _broadcast(self) -> None:
        """The weights, and the loss: in the room that the head of the gradients leaves in front."""
        self._loss.copy_(self.flat.head[:1])
        if self.flat.head_travels_alone:
            self.group.broadcast(self._loss, MASTER).wait()
        else:
            self.flat.data[:1] = self._loss
        self.group.broadcast(self.flat.data, MASTER).wait()
        if not self.flat.head_travels_alone:
            self._loss.copy_(self.flat.data[:1])
            self.flat.data[:1] = 0.0

    def report(self) -> dict[str, Any]:
        return self.traffic.report()
