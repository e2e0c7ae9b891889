"""The update of ZeRO: each rank updates the parameters that it owns, and others learn of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from torch import Tensor

from shoal.comm.group import Group
from shoal.replica.fsdp.sharded_params import ShardedParams
from shoal.sync import Replica
from shoal.sync.ddp import ExactReduce
from shoal.sync.movable_shards import MovableShards, gather_optimizer
from shoal.transport.transport import Work


class ShardedUpdate:
    """What the stages share after the gradients are agreed: who has which weights and state."""

    movable: MovableShards | None = None

    def __init__(self, replica: Replica):
        self.flat = replica.flat
        self.update = replica.update
        self.regroup(replica.group)

    def regroup(self, group: Group) -> None:
        """These are the ranks from now on."""
        self.group = group
        self.shards = self.flat.shards(group.size)

    @property
    def copied(self) -> list[slice]:
        """Shards of other ranks that this one updates, too."""
        return []

    def copy_gradients(self, own: Tensor, copies: Sequence[Tensor]) -> None:
        """Send the gradients of the own shard to its copies, and get those of `copied`."""

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
        whole = gather_optimizer(self.update, self.flat, self.group)
        self.update.optimizer = whole or sharded
        try:
            yield
        finally:
            self.update.optimizer = sharded


class ElasticUpdate(ShardedUpdate):
    """Each shard is updated by its owner and by the ranks that hold a copy of it."""

    movable: MovableShards

    def __init__(self, replica: Replica, copies: int):
        self.movable = MovableShards(replica.flat, replica.update, replica.group, copies)
        super().__init__(replica)

    @property
    def copied(self) -> list[slice]:
        return self.movable.held.copied

    def copy_gradients(self, own: Tensor, copies: Sequence[Tensor]) -> None:
        ranks = self.group.size
        works: list[Work] = []
        for distance, copy in enumerate(copies, 1):
            if own.numel():
                works.append(self.group.send(own, (self.group.rank + distance) % ranks))
            if copy.numel():
                works.append(self.group.recv(copy, (self.group.rank - distance) % ranks))
        for work in works:
            work.wait()

    def apply(self) -> None:
        self.movable.update_together(self.group)
        self.spread()


class ExactZero(ExactReduce):
    """The same bits as on one device: gradients are added up as there, whole on every rank.

    Where some ranks compute fewer micro-batches than others, they cannot gather sharded parameters
    alike: then all parameters are gathered for the time of a step.
    """

    def __init__(
        self, replica: Replica, microbatches: int, bucket_bytes: int, sharded: ShardedUpdate
    ):
        self.sharded = sharded
        self.movable = sharded.movable
        self._gathered = ExitStack()
        super().__init__(replica, microbatches, bucket_bytes)

    def regroup(self) -> None:
        super().regroup()
        self.sharded.regroup(self.group)
        self._is_even = self.root[1] % self.group.size == 0

    def begin(self) -> None:
        super().begin()
        self._gathered.close()
        if not self._is_even:
            self._gathered.enter_context(self.flat.full_params())

    def finish(self) -> None:
        self.collect()
        self._gathered.close()
        self.sharded.apply()

    def full_weights(self, optimizer: bool = False) -> AbstractContextManager[None]:
        return self.sharded.full_weights(optimizer)

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext()
