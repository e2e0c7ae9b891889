"""Sharded activations between stages: each rank sends its rows of a sequence as plain tensors.

Channels are gathered first: the next stage may use them in another way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.pytree import Tree
from shoal.replica.tensor.activations.sequence_parallel import SequenceParallelTensor
from shoal.replica.tensor.activations.sharded_tensor import ShardedActivation
from shoal.replica.tensor.rng import TensorParallelRng

_MARK = "rows of a sequence"


def pack(tree: Tree) -> Tree:
    """Rows as a tuple that can be sent to the same rank of another stage."""
    return _map(lambda leaf: isinstance(leaf, ShardedActivation), _packed, tree)


def _packed(leaf: ShardedActivation) -> Tree:
    if isinstance(leaf, SequenceParallelTensor):
        return _MARK, leaf.local, list(leaf.leading)
    return leaf.full()


def unpack(tree: Tree, group: Group, rng: TensorParallelRng) -> Tree:
    return _map(
        _is_packed,
        lambda leaf: SequenceParallelTensor.of(leaf[1], torch.Size(leaf[2]), group, rng),
        tree,
    )


def _is_packed(leaf: Any) -> bool:
    match leaf:
        case (str(mark), Tensor(), [*_]):
            return mark == _MARK
    return False


def _map(wanted: Callable[[Any], bool], change: Callable[[Any], Any], tree: Tree) -> Tree:
    if wanted(tree):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _map(wanted, change, value) for key, value in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_map(wanted, change, item) for item in tree)
    return tree
