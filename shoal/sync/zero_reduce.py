"""The gradients of ZeRO: buckets that lie inside shards are reduced to the owner of the shard."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.replica.fsdp.sharded_params import ShardedParams
from shoal.schedules.buffer_layout import (
    ON_THE_WAY,
    REUSED_BYTES,
    fitting,
    must_settle,
    sharded_bucket_bytes,
)
from shoal.sync import Replica, StepTraffic, Sync
from shoal.sync.zero_update import ShardedUpdate
from shoal.transport.transport import Work


class _Sent(NamedTuple):
    work: Work | None  # None: its call has not begun
    bucket: slice
    memory: Tensor


class ZeroReduce(Sync):
    """Buckets lie inside shards and are reduced to their owners, in fixed order.

    zero(1) keeps a gradient buffer of the whole model. zero(2) and zero(3) keep the owned shard;
    other buckets get memory while they are on their way, that of two at a time, and micro-batches
    are reduced one by one so that no whole gradient is ever kept.

    On a host whose cores all compute, calls do not run beside backward: a bucket is reduced when
    its memory is needed, or when backward has ended.
    """

    traffic: StepTraffic

    def __init__(
        self,
        replica: Replica,
        stage: int,
        sharded: ShardedUpdate,
        bucket_bytes: int | None = None,
    ):
        """`bucket_bytes`: by default they follow from the sizes of shards."""
        self.flat = replica.flat
        self._bucket_bytes = bucket_bytes
        self.sharded = sharded
        self.movable = sharded.movable
        self.every_microbatch = stage > 1
        self._replicas = replica.group
        self._gathering = self.flat.group if isinstance(self.flat, ShardedParams) else None
        self.traffic = StepTraffic()
        self.regroup()

    def regroup(self) -> None:
        self.group = self.traffic.count(self.flat, self._replicas)
        if isinstance(self.flat, ShardedParams) and self._gathering is not None:
            self.flat.group = self._gathering.counted(self.traffic)
        self.sharded.regroup(self.group)
        self._lay_out()

    def _lay_out(self) -> None:
        flat = self.flat
        ranks = self.group.size
        bucket_bytes = self._bucket_bytes or sharded_bucket_bytes(flat.size * flat.width, ranks)
        owned = flat.owned_buckets(ranks, bucket_bytes)
        self._owner = {bucket.start: rank for rank, bucket in owned}
        buckets = [bucket for _, bucket in owned]
        self.shard = self.sharded.shards[self.group.rank]
        keeps_all = not self.every_microbatch
        kept = slice(flat.offset, flat.size) if keeps_all else self.shard
        self._kept = self._zeros(kept)
        self._kept_at = kept
        self._copies = [
            self._kept_slice(where) if keeps_all else self._zeros(where)
            for where in self.sharded.copied
        ]
        self._last = buckets[-1].start
        self._room_elements = ON_THE_WAY * bucket_bytes // flat.dtype.itemsize
        self._is_deferred = flat.device.type == "cpu" and self.group.executor.takes_cores
        self._memory: Tensor | None = None  # of the bucket that is being filled
        self._sent: deque[_Sent] = deque()
        self._spare: list[Tensor] = []  # memory that was lent, for the next buckets
        flat.grads.watch(buckets, allocate=self._room)

    def _zeros(self, where: slice) -> Tensor:
        length = where.stop - where.start
        return torch.zeros(length, dtype=self.flat.dtype, device=self.flat.device)

    def begin(self) -> None:
        self._sent.clear()
        self._taken: set[int] = set()
        self._heads: list[tuple[Work | None, Tensor]] = []

    def reduce(self, bucket: slice) -> None:
        memory = self._memory
        assert memory is not None
        self._memory = None
        work = None if self._is_deferred else self._send(bucket, memory)
        self._sent.append(_Sent(work, bucket, memory))
        if bucket.start == self._last:
            head = self.flat.grads.header.clone()
            self._heads.append((None if self._is_deferred else self.group.all_reduce(head), head))

    def _send(self, bucket: slice, memory: Tensor) -> Work:
        return self.group.reduce(memory, root=self._owner[bucket.start])

    def finish(self) -> None:
        self.collect()
        self.sharded.apply()

    def spread(self) -> None:
        self.sharded.spread()

    def collect(self) -> None:
        while self._sent:
            self._settle_first()
        for work, head in self._heads:
            (work or self.group.all_reduce(head)).wait()
        self._head = torch.stack([head for _, head in self._heads]).sum(0)
        own = self._kept_slice(self.shard)
        self.sharded.copy_gradients(own, self._copies)
        held = zip([self.shard, *self.sharded.copied], [own, *self._copies], strict=True)
        arrived = self._head[1:].tolist()
        for where, memory in held:
            for i in self.flat.params_in(where):
                grad = self.flat.view(i, memory, where.start)
                self.flat.params[i].grad = grad if arrived[i] > 0 else None
        self.traffic.steps += 1

    def loss(self, local_loss: Tensor) -> Tensor:
        return self._head[0].clone()

    def gradient_tensors(self) -> list[Tensor]:
        filling = [] if self._memory is None else [self._memory]
        kept = [self._kept, *self._copies]
        return [*kept, *self._spare, *filling, *(sent.memory for sent in self._sent)]

    @contextmanager
    def full_weights(self, optimizer: bool = False) -> Iterator[None]:
        with self.traffic.uncounted(), self.sharded.full_weights(optimizer):
            yield

    def evaluating(self) -> AbstractContextManager[None]:
        return self.traffic.uncounted()

    def _room(self, bucket: slice) -> Tensor:
        """Memory for the gradients of a bucket: kept, or lent until they are with their owner."""
        if self.every_microbatch:
            self._make_room(bucket)
        kept = self._kept_at
        if kept.start <= bucket.start < kept.stop and bucket.start not in self._taken:
            self._taken.add(bucket.start)
            memory = self._kept_slice(bucket)
        else:
            memory = self._lend(bucket.stop - bucket.start)
        self._memory = memory
        return memory

    def _make_room(self, bucket: slice) -> None:
        """Wait until the memory of two buckets is enough, or one alone is on its way.

        All ranks wait at the same bucket: they must make their calls in one order.
        """
        sizes = [sent.bucket.stop - sent.bucket.start for sent in self._sent]
        while must_settle(sizes, bucket.stop - bucket.start, self._room_elements):
            sizes.pop(0)
            self._settle_first()

    def _settle_first(self) -> None:
        """Wait for the bucket that is on its way longest; add up what came to its owner."""
        work, bucket, memory = self._sent.popleft()
        (work or self._send(bucket, memory)).wait()
        is_kept = _storage(memory) == _storage(self._kept)
        if self._owner[bucket.start] == self.group.rank and not is_kept:
            self._kept_slice(bucket).add_(memory)
        whole = memory if memory._base is None else memory._base
        # of a host; the allocator of a GPU keeps memory itself
        if whole.is_cpu and whole.nbytes >= REUSED_BYTES and not is_kept:
            self._spare.append(whole)

    def _lend(self, size: int) -> Tensor:
        number = fitting([memory.numel() for memory in self._spare], size)
        if number is not None:
            return self._spare.pop(number)[:size]
        if size * self.flat.dtype.itemsize >= REUSED_BYTES:
            self._spare.clear()
        return torch.empty(size, dtype=self.flat.dtype, device=self.flat.device)

    def _kept_slice(self, bucket: slice) -> Tensor:
        start = self._kept_at.start
        return self._kept[bucket.start - start : bucket.stop - start]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
