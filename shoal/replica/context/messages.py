"""Positions of sequences between stages: each rank sends its own ones as plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from torch import Tensor

from shoal.pytree import Tree
from shoal.replica.context.sequence_shard import SequenceContext, SequenceShard
from shoal.replica.context.spec import SequenceSpec

_MARK = "positions of a sequence"


def pack(tree: Tree) -> Tree:
    """Sequences as tuples that can be sent to the same rank of another stage."""
    return _map(
        lambda leaf: isinstance(leaf, SequenceShard),
        lambda leaf: (_MARK, leaf.local, list(astuple(leaf.spec))),
        tree,
    )


def unpack(tree: Tree, context: SequenceContext) -> Tree:
    return _map(_is_packed, lambda leaf: context.wrap(leaf[1], SequenceSpec(*leaf[2])), tree)


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
