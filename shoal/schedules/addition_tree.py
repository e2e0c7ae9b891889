"""A binary tree over the index of the micro-batch, which fixes the order of additions.

m0   m1   m2   m3          1 replica adds the full tree,
 \\  /     \\  /           2 replicas one subtree each and then the root,
  +        +               4 replicas only inner nodes that they exchange.
   \\______/
"""

from __future__ import annotations

import itertools

Node = tuple[int, int]  # the run of leaves [start, stop) under a node of the tree


def children(node: Node) -> tuple[Node, Node]:
    """The left child holds the largest power of two that is smaller than the node."""
    start, stop = node
    left = 1 << (stop - start - 1).bit_length() - 1
    return (start, start + left), (start + left, stop)


def full_subtrees(root: Node, run: Node) -> list[Node]:
    """The largest nodes below `root` whose leaves all lie in `run`, from left to right."""
    if run[0] <= root[0] and root[1] <= run[1]:
        return [root]
    if root[1] <= run[0] or run[1] <= root[0]:
        return []
    left, right = children(root)
    return full_subtrees(left, run) + full_subtrees(right, run)


def runs_of(microbatches: int, replicas: int) -> list[Node]:
    """The leaves of each replica: as many, or one more or less where they do not divide evenly."""
    ends = [r * microbatches // replicas for r in range(replicas + 1)]
    return list(itertools.pairwise(ends))


def most_subtrees(microbatches: int, rank: int, replicas: int) -> int:
    """How many sums a replica has at a time, most, while it adds leaf after leaf of its run."""
    start, stop = runs_of(microbatches, replicas)[rank]
    ends = range(start + 1, stop + 1)
    return max((len(full_subtrees((0, microbatches), (start, end))) for end in ends), default=0)


def subtrees_sent(microbatches: int, replicas: int) -> int:
    """How many sums a replica sends, where all send as many."""
    runs = runs_of(microbatches, replicas)
    return max(len(full_subtrees((0, microbatches), run)) for run in runs)
