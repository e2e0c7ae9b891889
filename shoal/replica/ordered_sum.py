"""Addition in a fixed order: a binary tree over the index of the micro-batch.

m0   m1   m2   m3          1 replica adds the full tree,
 \\  /     \\  /           2 replicas one subtree each and then the root,
  +        +               4 replicas only inner nodes that they exchange.
   \\______/
"""

from __future__ import annotations

import itertools

from torch import Tensor

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


def tree_sum(root: Node, known: dict[Node, Tensor]) -> Tensor:
    """The sum at `root` from the sums at nodes below it; the order of additions is the tree's."""
    if root in known:
        return known[root]
    left, right = children(root)
    return tree_sum(left, known) + tree_sum(right, known)


def runs_of(microbatches: int, replicas: int) -> list[Node]:
    """The leaves of each replica: as many, or one more or less where they do not divide evenly."""
    ends = [r * microbatches // replicas for r in range(replicas + 1)]
    return list(itertools.pairwise(ends))


def add_leaf(root: Node, start: int, sums: dict[Node, Tensor], leaf: Tensor) -> None:
    """Add the next leaf of a run from `start`; two children of one node are folded at once."""
    done = max((node[1] for node in sums), default=start)
    sums[done, done + 1] = leaf.clone()
    for node in full_subtrees(root, (start, done + 1)):
        if node not in sums:
            sums[node] = tree_sum(node, sums)
            for below in [n for n in sums if n != node and node[0] <= n[0] and n[1] <= node[1]]:
                del sums[below]
