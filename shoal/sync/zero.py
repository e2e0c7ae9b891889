"""ZeRO: every replica computes on its slice of the batch and owns a shard of the training state.

    backward     bucket full ─▶ reduced to the rank that owns its parameters
    update       each rank updates the parameters that it owns, with an optimizer of its own
    then         (1, 2) owners broadcast their parameters; (3) they are gathered when used

    kept by      parameters   gradients   optimizer state
    zero(1)      all          all         1/n
    zero(2)      all          1/n         1/n
    zero(3)      1/n          1/n         1/n

A shard is a run of whole parameters, so optimizers that look at a whole parameter (LAMB) work.
A step moves each gradient once and each parameter once (zero(3): twice), as ddp does in total.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.call import PeerMessage
from shoal.comm.group import Group
from shoal.comm.transport.transport import Work
from shoal.errors import BadInput
from shoal.replica.deferred_init import DeferredInit, move, tensor_slots
from shoal.replica.flat_params import FlatParams
from shoal.replica.fsdp.sharded_params import HeldShards, ShardedParams
from shoal.replica.host_memory import HostCopies, host_zeros
from shoal.replica.split.shard import ReplicaShard
from shoal.schedules import buffer_layout
from shoal.schedules.buffer_layout import held_shards
from shoal.strategy.sync_terms import Zero
from shoal.sync import CountedSync, Ownership, Replica, Sync, SyncPlan, runs
from shoal.sync.ddp import ExactReduce, ddp_buckets
from shoal.sync.host_state import HostState
from shoal.sync.movable_shards import MovableShards, gather_optimizer
from shoal.sync.optimizer_step import GradNorm
from shoal.sync.shared_weights import build_shared


class ShardedUpdate:
    """What the stages share after the gradients are agreed: who has which weights and state.

    In elastic runs each shard is updated by its owner and by the ranks that hold a copy of it.
    """

    def __init__(self, replica: Replica, copies: int | None = None, offload: bool = False):
        """`copies` of each shard, in elastic runs."""
        self.flat = replica.flat
        self.update = replica.update
        self.host: HostState | None = None
        if offload:
            chunks = self.flat.update_chunks(replica.group.rank, replica.group.size)
            self.host = HostState(self.flat, self.update, chunks)
        self.movable: MovableShards | None = None
        if copies is not None:
            self.movable = MovableShards(self.flat, self.update, replica.group, copies)
        self.regroup(replica.group)

    def regroup(self, group: Group) -> None:
        """These are the ranks from now on."""
        self.group = group
        self.shards = self.flat.shards(group.size)

    @property
    def copied(self) -> list[slice]:
        """Shards of other ranks that this one updates, too."""
        return [] if self.movable is None else self.movable.held.copied

    def copy_gradients(self, own: Sequence[Tensor], copies: Sequence[Sequence[Tensor]]) -> None:
        """Send the gradients of the own shard to its copies, and get those of `copied`."""
        ranks = self.group.size
        rank = self.group.rank
        receives = [
            PeerMessage(memory, (rank - n) % ranks)
            for n, copy in enumerate(copies, 1)
            for memory in copy
        ]
        distances = range(1, len(copies) + 1)
        sends = [PeerMessage(memory, (rank + n) % ranks) for n in distances for memory in own]
        self.group.exchange(sends, receives).wait()

    def apply(self) -> None:
        if self.movable is not None:
            self.movable.update_together(self.group)
        else:
            self.update.apply()
            self.flat.zero_grad()
        self.spread()

    def host_tensors(self) -> list[Tensor]:
        if self.host is None:
            return []
        shard = [self.flat.shard_data] if isinstance(self.flat, ShardedParams) else []
        return [*shard, *self.host.tensors()]

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
                only = 0 if optimizer else None
                stack.enter_context(self.flat.full_params(only, computes=False))
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
        self.load_optimizer = None if sharded.host is None else sharded.host.load
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

    def host_tensors(self) -> list[Tensor]:
        return self.sharded.host_tensors()


class _Sent(NamedTuple):
    work: Work | None  # None: its call has not begun
    bucket: slice
    memory: Tensor


class ZeroReduce(CountedSync):
    """Buckets lie inside shards and are reduced to their owners, in fixed order.

    A bucket gets memory when its gradients come. Its owner keeps it until the update, so there is
    none while activations take the most. Other ranks give it back: under zero(1) when backward has
    ended; under zero(2) and zero(3), which reduce micro-batches one by one so that no whole
    gradient is ever kept, when two buckets are on their way.

    On a host whose cores all compute, calls do not run beside backward: a bucket is reduced when
    its memory is needed, or when backward has ended.
    """

    def __init__(
        self, replica: Replica, stage: int, sharded: ShardedUpdate, bucket_bytes: int | None = None
    ):
        """`bucket_bytes`: by default they follow from the sizes of shards."""
        super().__init__(replica)
        self._bucket_bytes = bucket_bytes
        self.sharded = sharded
        self.movable = sharded.movable
        self.load_optimizer = None if sharded.host is None else sharded.host.load
        self.every_microbatch = stage > 1
        self._host = sharded.host if stage > 1 else None  # where gradients are kept
        self._down = HostCopies(self.flat.device)
        self._kept_on_host: dict[int, Tensor] = {}  # by the start of a bucket
        self._norms: dict[int, Tensor] = {}
        self._gathering = self.flat.group if isinstance(self.flat, ShardedParams) else None
        self.regroup()

    def regroup(self) -> None:
        super().regroup()
        if isinstance(self.flat, ShardedParams) and self._gathering is not None:
            self.flat.group = self._gathering.counted(self.traffic)
        self.sharded.regroup(self.group)
        self._lay_out()

    def _lay_out(self) -> None:
        flat = self.flat
        ranks = self.group.size
        bucket_bytes = self._bucket_bytes or buffer_layout.sharded_bucket_bytes(
            flat.size * flat.width, ranks
        )
        owned = flat.owned_buckets(ranks, bucket_bytes)
        self._owner = {bucket.start: rank for rank, bucket in owned}
        buckets = [bucket for _, bucket in owned]
        own, *copied = held_shards(self.group.rank, ranks, len(self.sharded.copied))
        self._own_buckets = [bucket for rank, bucket in owned if rank == own]
        self._copied_buckets = [[one for rank, one in owned if rank == of] for of in copied]
        self._kept: dict[int, Tensor] = {}  # what has been reduced here, by the start of its bucket
        self._last = buckets[-1].start
        self._room_elements = buffer_layout.ON_THE_WAY * bucket_bytes // flat.dtype.itemsize
        self._is_deferred = flat.device.type == "cpu" and self.group.executor.takes_cores
        self._memory: Tensor | None = None  # of the bucket that is being filled
        self._sent: deque[_Sent] = deque()
        flat.grads.watch(buckets, allocate=self._room)

    def _empty(self, bucket: slice) -> Tensor:
        length = bucket.stop - bucket.start
        return torch.empty(length, dtype=self.flat.dtype, device=self.flat.device)

    def begin(self) -> None:
        self._sent.clear()
        self._kept.clear()
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
        self._kept.clear()

    def spread(self) -> None:
        self.sharded.spread()

    def collect(self) -> None:
        while self._sent:
            self._settle_first()
        self._down.end()
        for work, head in self._heads:
            (work or self.group.all_reduce(head)).wait()
        self._head = torch.stack([head for _, head in self._heads]).sum(0)
        copies = [[self._empty(bucket) for bucket in copied] for copied in self._copied_buckets]
        self.sharded.copy_gradients([self._kept[one.start] for one in self._own_buckets], copies)
        for copied, memories in zip(self._copied_buckets, copies, strict=True):
            self._kept |= {one.start: memory for one, memory in zip(copied, memories, strict=True)}
        for bucket in itertools.chain(self._own_buckets, *self._copied_buckets):
            params = self.flat.params_in(bucket)
            arrived = self.flat.grads.arrived(params, self._head)
            for i in params:
                grad = self.flat.view(i, self._kept[bucket.start], bucket.start)
                if i in arrived and self._host is not None and not self.shows_gradients:
                    self._host.gradients[i] = grad
                else:
                    self.flat.params[i].grad = grad.to(self.flat.device) if i in arrived else None
        if self._host is not None and self.update.clip_norm is not None:
            self.update.norms = [self._norms[i] for i in sorted(self._host.gradients)]
        self.traffic.steps += 1

    def loss(self, local_loss: Tensor) -> Tensor:
        return self._head[0].clone()

    def gradient_tensors(self) -> list[Tensor]:
        filling = [] if self._memory is None else [self._memory]
        kept = self._kept.values() if self._host is None else []
        return [*kept, *filling, *self._down.kept, *(sent.memory for sent in self._sent)]

    def host_tensors(self) -> list[Tensor]:
        return [*self.sharded.host_tensors(), *self._kept_on_host.values()]

    @contextmanager
    def full_weights(self, optimizer: bool = False) -> Iterator[None]:
        with self.traffic.uncounted(), self.sharded.full_weights(optimizer):
            yield

    def evaluating(self) -> AbstractContextManager[None]:
        return self.traffic.uncounted()

    def _room(self, bucket: slice) -> Tensor:
        """Memory for the gradients of a bucket."""
        if self.every_microbatch:
            self._make_room(bucket)
        self._memory = self._empty(bucket)
        return self._memory

    def _make_room(self, bucket: slice) -> None:
        """Wait until the memory of two buckets is enough, or one alone is on its way.

        All ranks wait at the same bucket: they must make their calls in one order.
        """
        sizes = [sent.bucket.stop - sent.bucket.start for sent in self._sent]
        while buffer_layout.must_settle(sizes, bucket.stop - bucket.start, self._room_elements):
            sizes.pop(0)
            self._settle_first()

    def _settle_first(self) -> None:
        """Wait for the bucket that is on its way longest; add up what came to its owner."""
        work, bucket, memory = self._sent.popleft()
        (work or self._send(bucket, memory)).wait()
        if self._owner[bucket.start] != self.group.rank:
            return
        if self._host is not None:
            self._take_down(bucket, memory)
            return
        total = self._kept.setdefault(bucket.start, memory)
        if total is not memory:
            total.add_(memory)

    def _take_down(self, bucket: slice, memory: Tensor) -> None:
        """Add the gradients of a bucket to those in the host's memory, beside backward."""
        start = bucket.start
        if start not in self._kept_on_host:
            zeros = host_zeros(memory.numel(), memory.dtype, memory.device)
            self._kept_on_host[start] = zeros
        with self._down.beside():
            if start in self._kept:
                memory.add_(self._kept[start].to(memory.device, non_blocking=True))
            if self.update.clip_norm is not None:
                members = self.flat.params_in(bucket)
                grads = [self.flat.view(i, memory, start) for i in members]
                self._norms.update(zip(members, torch._foreach_norm(grads), strict=True))
            self._kept[start] = self._kept_on_host[start].copy_(memory, non_blocking=True)
        self._down.keep([memory])


def owned_params(flat: FlatParams, group: Group) -> list[tuple[str, nn.Parameter]]:
    """The parameters that this rank owns; none where there are more ranks than parameters."""
    shard = flat.shards(group.size)[group.rank]
    return [flat.named[i] for i in flat.params_in(shard)]


def sum_over_shards(flat: FlatParams, group: Group, squares: Tensor) -> Tensor:
    """The sum of squares over all shards, from that of this one."""
    total = squares.to(flat.device)
    group.all_reduce(total).wait()
    return total


@runs(Zero)
class ZeroPlan(SyncPlan[Zero]):
    can_be_exact = True

    def shards_parameters(self, replicas: int) -> bool:
        return self.term.shards_parameters(replicas)

    def materialize(
        self, model: nn.Module, dp: Group, device: torch.device, is_split: bool = False
    ) -> DeferredInit:
        """With offload the device has no room for parameters and a buffer of all of them."""
        if is_split or not self.term.offload or self.shards_parameters(dp.size):
            return super().materialize(model, dp, device, is_split)
        deferred = DeferredInit(model)
        deferred.fill_all(model)
        return deferred

    def layout(
        self, shard: ReplicaShard, dp: Group, device: torch.device, deferred: DeferredInit
    ) -> FlatParams:
        if not self.shards_parameters(dp.size):
            whole = FlatParams(shard.named, device)
            if self.term.offload and shard.compute_module is None:
                move_untrained(shard.model, whole, device)
            return whole
        flat = ShardedParams(
            shard.model,
            dp,
            device,
            deferred,
            shard.named,
            shard.compute_module,
            self.term.shard_copies,
            self.term.offload,
        )
        if shard.compute_module is None:  # else it is on the device, and the rest has no memory
            move_untrained(shard.model, flat, device)
        return flat

    def owns(self, flat: FlatParams, dp: Group, exact: bool) -> Ownership:
        held = HeldShards(flat, dp.rank, dp.size, self.term.shard_copies)
        named = [flat.named[i] for i in held.params]
        if exact:  # every rank has the full gradient
            return Ownership(named, GradNorm(params=flat.params))
        counted = [p for _, p in owned_params(flat, dp)] if self.term.elastic else None
        return Ownership(named, GradNorm(partial(sum_over_shards, flat, dp), counted=counted))

    def build(self, replica: Replica) -> Sync:
        if self.term.may_share_weights and replica.exact_microbatches is None:
            buckets = ddp_buckets(replica.flat, buffer_layout.DEFAULT_BUCKET_BYTES)
            shared = build_shared(replica, buckets, self.term.shared_weights)
            if shared is not None:
                return shared
        if self.term.offload:
            self._check_offload(replica)
        copies = self.term.copies if self.term.elastic else None
        sharded = ShardedUpdate(replica, copies, self.term.offload)
        if replica.exact_microbatches is not None:
            return ExactZero(
                replica, replica.exact_microbatches, buffer_layout.DEFAULT_BUCKET_BYTES, sharded
            )
        return ZeroReduce(replica, self.term.stage, sharded)

    def _check_offload(self, replica: Replica) -> None:
        update = replica.update
        if self.term.stage == 1 or replica.exact_microbatches is not None:
            return
        is_clipped = update.clip_norm is not None and update.grad_norm.over_replica is not None
        if is_clipped or update.scaler is not None:
            what = "clip_norm of a split model" if is_clipped else 'fp16 and on_nan="skip"'
            raise BadInput(
                f"{what} needs all gradients on the device, and {self.term} keeps them in the "
                f"host's memory: take {replace(self.term, stage=1)}"
            )


def move_untrained(model: nn.Module, flat: FlatParams, device: torch.device) -> None:
    """Bring to the device what is not sharded: frozen parameters and buffers."""
    trained = {id(p) for p in flat.params}
    move([slot for slot in tensor_slots(model) if id(slot.tensor) not in trained], device)
