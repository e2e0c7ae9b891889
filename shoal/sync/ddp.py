"""Data parallelism: every replica ends backward with the sum of everybody's gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.comm.counting import CountingGroup
from shoal.comm.group import Group
from shoal.replica.flat_params import FlatParams
from shoal.sync.base import Sync
from shoal.sync.optimizer_step import Update
from shoal.sync.traffic import StepTraffic
from shoal.transport.transport import Work

FIRST_BUCKET_BYTES = 1 << 20
LARGE_BYTES = 1 << 20  # a gradient of this size is worth a call of its own, and no copy


class AllReduce(Sync):
    """Buckets are all-reduced while backward runs, in fixed order; then every replica updates.

    Gradients come weighted by their share of the global batch, so the sum is the mean. A step
    exchanges the gradients once, plus one number a parameter and the loss.
    """

    def __init__(self, flat: FlatParams, update: Update, group: Group, bucket_bytes: int):
        self.flat = flat
        self.update = update
        self.group = CountingGroup(group)
        self.traffic = StepTraffic(flat, self.group)
        self._under_way: list[Work] = []
        flat.grads.watch(
            flat.buckets(bucket_bytes, min(bucket_bytes, FIRST_BUCKET_BYTES)), LARGE_BYTES
        )

    def begin(self) -> None:
        self._under_way.clear()

    def reduce(self, bucket: slice) -> None:
        for tensor in self.flat.grads.tensors(bucket):
            self._under_way.append(self.group.all_reduce(tensor))

    def finish(self) -> None:
        for work in self._under_way:
            work.wait()
        self.traffic.steps += 1
        self.flat.grads.publish()
        self.update.apply()
        self.flat.zero_grad()

    def gradient_bytes(self) -> int:
        return self.flat.grads.buffer.nbytes + self.flat.grads.in_place_bytes()

    def loss(self, part: Tensor) -> Tensor:
        return self.flat.grads.header[0].clone()

    def report(self) -> dict[str, Any]:
        return self.traffic.report()
