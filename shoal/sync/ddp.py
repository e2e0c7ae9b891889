"""Data parallelism: every replica ends backward with the sum of all replicas' gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.comm.counting import Counting
from shoal.comm.group import Group
from shoal.strategy.terms import Ddp
from shoal.sync.base import FIRST_BUCKET_BYTES, Replica, StepSettings, Sync, SyncPlan
from shoal.sync.compressed_sum import refuse_scaled
from shoal.sync.ddp_compressed import CompressedReduce
from shoal.sync.ddp_exact import ExactReduce
from shoal.sync.registry import runs
from shoal.sync.traffic import StepTraffic
from shoal.transport.transport import Work

LARGE_BYTES = 1 << 20  # a gradient of this size is worth a call of its own, and no copy


class DdpSync(Sync):
    """Buckets are all-reduced while backward runs, in fixed order; then every replica updates.

    Gradients come weighted by their share of the global batch, so the sum is the mean. A step
    exchanges the gradients once, plus one number a parameter and the loss.
    """

    def __init__(self, replica: Replica, bucket_bytes: int):
        flat = replica.flat
        self.flat = flat
        self.update = replica.update
        self.counter = Counting(replica.group.executor)
        self.group = Group(self.counter)
        self.traffic = StepTraffic(flat, self.counter)
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

    def loss(self, local_loss: Tensor) -> Tensor:
        return self.flat.grads.header[0].clone()

    def report(self) -> dict[str, Any]:
        return self.traffic.report()


@runs(Ddp)
class DdpPlan(SyncPlan[Ddp]):
    @property
    def bucket_bytes(self) -> int:
        return int(self.term.bucket_mb * (1 << 20))

    @property
    def can_be_exact(self) -> bool:
        return self.term.compress is None

    def check(self, options: StepSettings, replicas: int) -> None:
        super().check(options, replicas)
        if self.term.compress is not None:
            refuse_scaled(self.term, options)

    def build(self, replica: Replica) -> Sync:
        if replica.exact_microbatches is not None:
            return ExactReduce(replica, replica.exact_microbatches, self.bucket_bytes)
        if self.term.compress is not None:
            return CompressedReduce(replica, self.bucket_bytes, self.term.compress)
        return DdpSync(replica, self.bucket_bytes)
