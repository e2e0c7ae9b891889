"""Addition in a fixed order: a binary tree over the index of the micro-batch.

m0   m1   m2   m3          1 replica adds the whole tree,
 \\  /     \\  /           2 replicas one half each and then the root,
  +        +               4 replicas only inner nodes that they exchange.
   \\______/
"""

from __future__ import annotations

from torch import Tensor

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


def runs_of(microbatches: int, replicas: int) -> list[Node]:
    """The leaves of each replica; `replicas` divides `microbatches`."""
    each = microbatches // replicas
    return [(r * each, (r + 1) * each) for r in range(replicas)]


def note_leaf(root: Node, start: int, sums: dict[Node, Tensor], leaf: Tensor) -> None:
    """Add the next leaf of a run that begins at `start`.

    Sums are folded as soon as two children of one node stand side by side.
    """
    done = max((node[1] for node in sums), default=start)
    sums[done, done + 1] = leaf.clone()
    for node in whole_subtrees(root, (start, done + 1)):
        if node not in sums:
            sums[node] = add_up(node, sums)
            for part in [n for n in sums if n != node and node[0] <= n[0] and n[1] <= node[1]]:
                del sums[part]
