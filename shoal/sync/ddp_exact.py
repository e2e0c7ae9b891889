"""The same bits at any number of replicas, up to the number of micro-batches.

Floating-point addition is not associative, so the order of additions is fixed: a binary tree
over the index of the micro-batch, whichever replica computed it (`replica/ordered_sum.py`).

A replica owns a run of leaves. It adds up the largest whole subtrees inside that run, these are
gathered (at most 2·log2 M of them a replica), and every replica finishes the tree.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shoal.replica.ordered_sum import Node, add_leaf, full_subtrees, runs_of, tree_sum
from shoal.schedules.buffer_layout import DEFAULT_BUCKET_BYTES
from shoal.sync import Replica, Sync
from shoal.sync.memory import ModelSizes, SyncMemory


class ExactReduce(Sync):
    """Gradients per micro-batch, added in the tree's order; then every replica updates."""

    every_microbatch = True

    def __init__(self, replica: Replica, microbatches: int, bucket_bytes: int):
        self.flat = replica.flat
        self.update = replica.update
        self.group = replica.group
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


def exact_memory(
    memory: SyncMemory,
    sizes: ModelSizes,
    rank: int,
    replicas: int,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> SyncMemory:
    """With a gradient buffer and the partial sums of `ExactReduce`."""
    gradients = sizes.bucketed_gradients(sizes.flat.buckets(bucket_bytes))
    return replace(memory, gradients=gradients, copies=sizes.exact_sums(rank, replicas))
