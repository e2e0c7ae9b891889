"""The same bits at any number of replicas that divides the number of micro-batches.

Floating-point addition is not associative, so the order of additions is fixed: a binary tree
over the index of the micro-batch, whoever computed it.

    m0   m1   m2   m3          1 replica adds the whole tree,
     \\  /     \\  /           2 replicas one half each and then the root,
      +        +               4 replicas only inner nodes that they exchange.
       \\______/

A replica owns a run of leaves. It adds up the largest whole subtrees inside that run, these are
gathered (at most 2·log2 M of them a replica), and everybody finishes the tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.group.group import Group
from shoal.replica.flat import FlatParams
from shoal.sync.sync import Sync
from shoal.sync.update import Update

Node = tuple[int, int]  # the run of leaves [start, stop) under a node of the tree


def halves(node: Node) -> tuple[Node, Node]:
    """The children of a node: the left one holds the largest power of two that is smaller."""
    start, stop = node
    left = 1 << (stop - start - 1).bit_length() - 1
    return (start, start + left), (start + left, stop)


def whole_subtrees(root: Node, run: Node) -> list[Node]:
    """The largest nodes below `root` whose leaves all lie in `run`, from left to right."""
    if run[0] <= root[0] and root[1] <= run[1]:
        return [root]
    if root[1] <= run[0] or run[1] <= root[0]:
        return []
    left, right = halves(root)
    return whole_subtrees(left, run) + whole_subtrees(right, run)


def add_up(root: Node, known: dict[Node, Tensor]) -> Tensor:
    """The sum at `root` from the sums at nodes below it; the order of additions is the tree's."""
    if root in known:
        return known[root]
    left, right = halves(root)
    return add_up(left, known) + add_up(right, known)


class ExactReduce(Sync):
    """Gradients per micro-batch, added in the tree's order; then every replica updates."""

    every_microbatch = True

    def __init__(
        self,
        flat: FlatParams,
        update: Update,
        group: Group,
        microbatches: int,
        bucket_bytes: int,
    ):
        self.flat, self.update, self.group = flat, update, group
        self.root = (0, microbatches)
        each = microbatches // group.size
        self.runs = [(r * each, (r + 1) * each) for r in range(group.size)]
        self._sums: dict[int, dict[Node, Tensor]] = {}
        flat.watch(flat.buckets(bucket_bytes))

    def begin(self) -> None:
        self._sums = {bucket.start: {} for bucket in self.flat.buckets_of_grad}
        self._head: dict[Node, Tensor] = {}

    def reduce(self, bucket: slice) -> None:
        self._note(self._sums[bucket.start], self.flat.grad[bucket])
        if bucket.start == 0 and self.flat.head_travels_alone:
            self._note(self._head, self.flat.head)

    def finish(self) -> None:
        for bucket in self.flat.buckets_of_grad:
            self.flat.grad[bucket] = self._agree(self._sums[bucket.start])
        if self.flat.head_travels_alone:
            self.flat.head.copy_(self._agree(self._head))
        self.flat.publish()
        self.apply()

    def apply(self) -> None:
        """The gradients are agreed and with the parameters."""
        self.update.apply()
        self.flat.drop_gradients()

    def gradient_bytes(self) -> int:
        return self.flat.grad.nbytes

    def loss(self, part: Tensor) -> Tensor:
        return self.flat.head[0].clone()

    def _note(self, sums: dict[Node, Tensor], leaf: Tensor) -> None:
        """Add a leaf, then fold while two children of one node stand side by side."""
        start, _ = self.runs[self.group.rank]
        done = max((node[1] for node in sums), default=start)
        sums[done, done + 1] = leaf.clone()
        for node in whole_subtrees(self.root, (start, done + 1)):
            if node not in sums:
                sums[node] = add_up(node, sums)
                for part in [n for n in sums if n != node and node[0] <= n[0] and n[1] <= node[1]]:
                    del sums[part]

    def _agree(self, mine: dict[Node, Tensor]) -> Tensor:
        nodes = [whole_subtrees(self.root, run) for run in self.runs]
        most = max(map(len, nodes))
        own = [mine[node] for node in nodes[self.group.rank]]
        message = torch.stack(own + [own[0]] * (most - len(own)))
        everything = message.new_empty(self.group.size, *message.shape)
        self.group.all_gather(everything, message).wait()
        known = {
            node: everything[rank, i]
            for rank, own in enumerate(nodes)
            for i, node in enumerate(own)
        }
        return add_up(self.root, known)
