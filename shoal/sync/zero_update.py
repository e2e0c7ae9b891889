"""The update of ZeRO: each rank updates the parameters that it owns, and others learn of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from shoal.comm.group import Group
from shoal.replica.fsdp.sharded_params import ShardedParams
from shoal.sync.base import Replica
from shoal.sync.ddp_exact import ExactReduce
from shoal.sync.gather_optimizer import gather_optimizer


class ShardedUpdate:
    """What the stages share after the gradients are agreed: who has which weights and state."""

    def __init__(self, replica: Replica, group: Group):
        self.flat = replica.flat
        self.update = replica.update
        self.group = group
        self.shards = self.flat.shards(group.size)

    def apply(self) -> None:
        self.update.apply()
        self.flat.zero_grad()
        self.spread()

    def spread(self) -> None:
        if isinstance(self.flat, ShardedParams):
            self.flat.reshard()
            return
        shards = [(r, self.flat.data[s]) for r, s in enumerate(self.shards) if s.start < s.stop]
        for work in [self.group.broadcast(shard, root=rank) for rank, shard in shards]:
            work.wait()

    @contextmanager
    def full_weights(self, optimizer: bool) -> Iterator[None]:
        with ExitStack() as stack:
            if isinstance(self.flat, ShardedParams):
                stack.enter_context(self.flat.full_params(only=0 if optimizer else None))
            if optimizer:
                stack.enter_context(self._whole_optimizer())
            yield

    @contextmanager
    def _whole_optimizer(self) -> Iterator[None]:
        sharded = self.update.optimizer
        self.update.optimizer = gather_optimizer(self.update, self.flat, self.group) or sharded
        try:
            yield
        finally:
            self.update.optimizer = sharded

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext()


class ExactZero(ExactReduce):
    """The same bits as on one device: gradients are added up as there, whole on every rank."""

    def __init__(self, replica: Replica, microbatches: int, bucket_bytes: int):
        super().__init__(replica, microbatches, bucket_bytes)
        self.sharded = ShardedUpdate(replica, replica.group)

    def apply(self) -> None:
        self.sharded.apply()

    def full_weights(self, optimizer: bool = False) -> AbstractContextManager[None]:
        return self.sharded.full_weights(optimizer)

    def evaluating(self) -> AbstractContextManager[None]:
        return self.sharded.evaluating()
