"""One replica alone: nothing to agree on."""

from __future__ import annotations

from shoal.schedules.buffer_layout import DEFAULT_BUCKET_BYTES
from shoal.strategy.sync_terms import Single
from shoal.sync import Replica, Sync, SyncPlan, runs
from shoal.sync.ddp_exact import ExactReduce, exact_memory
from shoal.sync.memory import ModelSizes, SyncMemory


class LocalSync(Sync):
    """Gradients stay where backward put them; no buckets, no copies."""

    collects = False

    def __init__(self, replica: Replica):
        self.flat = replica.flat
        self.update = replica.update


@runs(Single)
class SinglePlan(SyncPlan[Single]):
    can_be_exact = True

    def memory(self, sizes: ModelSizes, rank: int, replicas: int) -> SyncMemory:
        if sizes.exact_microbatches is not None:
            return exact_memory(super().memory(sizes, rank, replicas), sizes, rank, replicas)
        return super().memory(sizes, rank, replicas)

    def build(self, replica: Replica) -> Sync:
        if replica.exact_microbatches is not None:
            return ExactReduce(replica, replica.exact_microbatches, DEFAULT_BUCKET_BYTES)
        return LocalSync(replica)
