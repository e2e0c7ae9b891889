"""Data parallelism: every replica ends backward with the sum of all replicas' gradients.

And `single`, one replica alone: nothing to agree on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.transport.transport import Work
from shoal.replica.flat_params import FlatLayout
from shoal.replica.ordered_sum import add_leaf, tree_sum
from shoal.schedules.addition_tree import Node, full_subtrees, runs_of
from shoal.schedules.buffer_layout import DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES, LARGE_BYTES
from shoal.strategy.sync_terms import Ddp, Single
from shoal.sync import CHANGING_SCALE, CountedSync, Replica, Sync, SyncPlan, runs, under


class DdpSync(CountedSync):
    """Buckets are all-reduced in fixed order, while backward runs, or after it if cores are busy.

    Gradients come weighted by their share of the global batch, so the sum is the mean. A step
    exchanges the gradients once, plus one number a parameter and the loss.
    """

    def __init__(self, replica: Replica, buckets: list[slice], large_bytes: int | None = None):
        """A gradient of `large_bytes` is exchanged by itself."""
        super().__init__(replica)
        self._under_way: list[Work] = []
        self._is_deferred = self._takes_turns()
        self._deferred: list[Tensor] = []
        self._exchange = self.group.all_reduce
        self.flat.grads.watch(buckets, large_bytes)

    def _takes_turns(self) -> bool:
        """Where every core computes, calls beside backward would only take turns with it."""
        return self.flat.device.type == "cpu" and self.group.executor.takes_cores

    def regroup(self) -> None:
        super().regroup()
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


class CompressedReduce(DdpSync):
    """With packed buckets. The header (loss and flags) travels as it is.

    A bucket is packed and on its way while backward still runs; its further stages follow in
    `finish`. The gradients of a step are those that arrived, the same bits on every replica.
    """

    def __init__(self, replica: Replica, buckets: list[slice], compress: str):
        from shoal.sync.compressed_sum import make_compressed_sum

        super().__init__(replica, buckets)
        bodies = [without_header(self.flat, bucket) for bucket in buckets]
        self.sums = make_compressed_sum(compress, self.flat, self.group, bodies, replica.copies)
        self._gaps = self.flat.gaps()
        self._copies = replica.copies

    def begin(self) -> None:
        super().begin()
        self.sums.under_way.clear()

    def reduce(self, bucket: slice) -> None:
        body = without_header(self.flat, bucket)
        self.sums.start(self.flat.grads.buffer[body], body)
        if bucket.start == 0:
            self._under_way.append(self.group.all_reduce(self.flat.grads.header))

    def collect(self) -> None:
        from shoal.sync.compressed_sum import synchronize_copies

        self.sums.finish()
        self._wait()
        self.flat.grads.buffer[self._gaps] = 0.0  # unpacking leaves noise there, which would add up
        self.sums.clear_unused()
        synchronize_copies(self.flat, self.flat.grads.buffer, self._copies)
        self.flat.grads.publish()

    def state(self) -> dict[str, Tensor]:
        """What each worker has still to send, and what the method carries from step to step."""
        with self.traffic.uncounted():
            saved = self.sums.state()
        return {f"gradients/{name}": tensor for name, tensor in saved.items()}

    def check_state(self, tensors: dict[str, Tensor]) -> None:
        self.sums.check_state(under("gradients/", tensors))

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self.sums.load_state(under("gradients/", tensors))
        self.sums.clear_unused()

    def summary(self) -> list[str]:
        return self.traffic.summary()


def ddp_buckets(layout: FlatLayout, bucket_bytes: int) -> list[slice]:
    """The buckets of a step; the one that is full first is small."""
    return layout.buckets(bucket_bytes, min(bucket_bytes, FIRST_BUCKET_BYTES))


def without_header(layout: FlatLayout, bucket: slice) -> slice:
    """A bucket without the header, which travels uncompressed."""
    return slice(max(bucket.start, layout.offset), bucket.stop)


@runs(Ddp)
class DdpPlan(SyncPlan[Ddp]):
    @property
    def bucket_bytes(self) -> int:
        return int(self.term.bucket_mb * (1 << 20))

    @property
    def can_be_exact(self) -> bool:
        return self.term.compress is None

    def why_not_scaled(self, replicas: int) -> str | None:
        return CHANGING_SCALE if self.term.compress else super().why_not_scaled(replicas)

    def build(self, replica: Replica) -> Sync:
        if replica.exact_microbatches is not None:
            return ExactReduce(replica, replica.exact_microbatches, self.bucket_bytes)
        buckets = ddp_buckets(replica.flat, self.bucket_bytes)
        if self.term.compress is not None:
            return CompressedReduce(replica, buckets, self.term.compress)
        if self.term.may_share_weights:
            from shoal.sync.shared_weights import build_shared

            if (shared := build_shared(replica, buckets, self.term.shared_weights)) is not None:
                return shared
        few_large = replica.group.executor.few_large
        return DdpSync(replica, buckets, None if few_large else LARGE_BYTES)


class ExactReduce(Sync):
    """exact=True: the same bits at any number of replicas, up to the number of micro-batches.

    Floating-point addition is not associative, so the order of additions is fixed: a binary tree
    over the index of the micro-batch, whichever replica computed it (`replica/ordered_sum.py`).

    A replica owns a run of leaves. It adds up the largest whole subtrees inside that run, these are
    gathered (at most 2·log2 M of them a replica), and every replica finishes the tree and updates.
    """

    every_microbatch = True

    def __init__(self, replica: Replica, microbatches: int, bucket_bytes: int):
        super().__init__(replica)
        self.root = (0, microbatches)
        self.regroup()
        self._sums: dict[tuple[int, int], dict[Node, Tensor]] = {}
        self.flat.grads.watch(self.flat.buckets(bucket_bytes))

    def regroup(self) -> None:
        self.runs = runs_of(self.root[1], self.group.size)

    def begin(self) -> None:
        self._sums = {}

    def reduce(self, bucket: slice) -> None:
        for number, tensor in enumerate(self.flat.grads.tensors[bucket.start]):
            sums = self._sums.setdefault((bucket.start, number), {})
            add_leaf(self.root, self.runs[self.group.rank][0], sums, tensor)

    def collect(self) -> None:
        for bucket in self.flat.grads.buckets:
            for number, tensor in enumerate(self.flat.grads.tensors[bucket.start]):
                tensor.copy_(self._agree(self._sums[bucket.start, number]))
        self.flat.grads.publish()

    def loss(self, local_loss: Tensor) -> Tensor:
        return self.flat.grads.header[0].clone()

    def _agree(self, mine: dict[Node, Tensor]) -> Tensor:
        nodes = [full_subtrees(self.root, run) for run in self.runs]
        most = max(map(len, nodes))
        sums = [mine[node] for node in nodes[self.group.rank]]
        message = torch.stack(sums + [sums[0]] * (most - len(sums)))
        everything = message.new_empty(self.group.size, *message.shape)
        self.group.all_gather(everything, message).wait()
        known = {
            node: everything[rank, i]
            for rank, of_rank in enumerate(nodes)
            for i, node in enumerate(of_rank)
        }
        return tree_sum(self.root, known)


class LocalSync(Sync):
    """Gradients stay where backward put them; no buckets, no copies."""

    collects = False
    is_alone = True


@runs(Single)
class SinglePlan(SyncPlan[Single]):
    can_be_exact = True

    def build(self, replica: Replica) -> Sync:
        if replica.exact_microbatches is not None:
            return ExactReduce(replica, replica.exact_microbatches, DEFAULT_BUCKET_BYTES)
        return LocalSync(replica)
