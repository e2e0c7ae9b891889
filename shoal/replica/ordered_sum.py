"""Addition in the fixed order of a tree (`schedules/addition_tree.py`)."""

from __future__ import annotations

from torch import Tensor

from shoal.schedules.addition_tree import Node, children, full_subtrees


def tree_sum(root: Node, known: dict[Node, Tensor]) -> Tensor:
    """The sum at `root` from the sums at nodes below it; the order of additions is the tree's."""
    if root in known:
        return known[root]
    left, right = children(root)
    return tree_sum(left, known) + tree_sum(right, known)


def add_leaf(root: Node, start: int, sums: dict[Node, Tensor], leaf: Tensor) -> None:
    """Add the next leaf of a run from `start`; two children of one node are folded at once."""
    done = max((node[1] for node in sums), default=start)
    sums[done, done + 1] = leaf.clone()
    for node in full_subtrees(root, (start, done + 1)):
        if node not in sums:
            sums[node] = tree_sum(node, sums)
            for below in [n for n in sums if n != node and node[0] <= n[0] and n[1] <= node[1]]:
                del sums[below]
