"""Data parallelism: every replica ends backward with the sum of all replicas' gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from shoal.schedules.buffer_layout import LARGE_BYTES
from shoal.strategy.sync_terms.ddp import Ddp
from shoal.sync.base import Replica, StepSettings, Sync, SyncPlan, runs
from shoal.sync.ddp_compressed import CompressedReduce, compressed_ddp_memory, ddp_buckets
from shoal.sync.memory import ModelSizes, SyncMemory
from shoal.sync.traffic import StepTraffic
from shoal.transport.transport import Work


class DdpSync(Sync):
    """Buckets are all-reduced while backward runs, in fixed order; then every replica updates.

    On a host whose cores all compute they are all-reduced when backward has ended.

    Gradients come weighted by their share of the global batch, so the sum is the mean. A step
    exchanges the gradients once, plus one number a parameter and the loss.
    """

    def __init__(self, replica: Replica, buckets: list[slice], large_bytes: int | None = None):
        """A gradient of `large_bytes` is exchanged by itself."""
        flat = replica.flat
        self.flat = flat
        self.update = replica.update
        self._replicas = replica.group
        self.traffic = StepTraffic()
        self.group = self.traffic.count(flat, replica.group)
        self._under_way: list[Work] = []
        self._is_deferred = self._takes_turns()
        self._deferred: list[Tensor] = []
        self._exchange = self.group.all_reduce
        flat.grads.watch(buckets, large_bytes)

    def _takes_turns(self) -> bool:
        """Where every core computes, calls beside backward would only take turns with it."""
        return self.flat.device.type == "cpu" and self.group.executor.takes_cores

    def regroup(self) -> None:
        self.group = self.traffic.count(self.flat, self._replicas)
        self._exchange = self.group.all_reduce
        self._is_deferred = self._takes_turns()

    def begin(self) -> None:
        self._under_way.clear()
        self._deferred.clear()

    def reduce(self, bucket: slice) -> None:
        tensors = self.flat.grads.tensors[bucket.start]
        if self._is_deferred:
            self._deferred += tensors
            return
        self._under_way += map(self._exchange, tensors)

    def collect(self) -> None:
        self._wait()
        self.flat.grads.publish()

    def _wait(self) -> None:
        for work in self._under_way:
            work.wait()
        for tensor in self._deferred:
            self._exchange(tensor).wait()
        self._deferred.clear()
        self.traffic.steps += 1

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
            from shoal.sync.compressed_sum import refuse_scaled

            refuse_scaled(self.term, options)

    def memory(self, sizes: ModelSizes, rank: int, replicas: int) -> SyncMemory:
        plain = super().memory(sizes, rank, replicas)
        if sizes.exact_microbatches is not None:
            from shoal.sync.ddp_exact import exact_memory

            return exact_memory(plain, sizes, rank, replicas, self.bucket_bytes)
        buckets = ddp_buckets(sizes.flat, self.bucket_bytes)
        if self.term.compress is not None:
            return compressed_ddp_memory(self.term.compress, plain, sizes, buckets, rank, replicas)
        return replace(plain, gradients=sizes.bucketed_gradients(buckets, LARGE_BYTES))

    def build(self, replica: Replica) -> Sync:
        if replica.exact_microbatches is not None:
            from shoal.sync.ddp_exact import ExactReduce

            return ExactReduce(replica, replica.exact_microbatches, self.bucket_bytes)
        if self.term.compress is not None:
            return CompressedReduce(replica, self.bucket_bytes, self.term.compress)
        return DdpSync(replica, ddp_buckets(replica.flat, self.bucket_bytes), LARGE_BYTES)
