"""Sharded activations between stages: each rank sends its rows of a sequence as plain tensors.

Channels are gathered first: the next stage may use them in another way.
"""

from __future__ import annotations

from functools import partial

import torch

from shoal.comm.group import Group
from shoal.pytree import Tree, is_marked, map_leaves
from shoal.replica.tensor.activations.sequence_parallel import SequenceParallelTensor
from shoal.replica.tensor.activations.sharded_tensor import ShardedActivation
from shoal.replica.tensor.rng import TensorParallelRng

_MARK = "rows of a sequence"


def pack(tree: Tree) -> Tree:
    """Rows as a tuple that can be sent to the same rank of another stage."""
    return map_leaves(lambda leaf: isinstance(leaf, ShardedActivation), _packed, tree)


def _packed(leaf: ShardedActivation) -> Tree:
    if isinstance(leaf, SequenceParallelTensor):
        return _MARK, leaf.local, list(leaf.leading)
    return leaf.full()


def unpack(tree: Tree, group: Group, rng: TensorParallelRng) -> Tree:
    return map_leaves(
        partial(is_marked, mark=_MARK),
        lambda leaf: SequenceParallelTensor.of(leaf[1], torch.Size(leaf[2]), group, rng),
        tree,
    )
