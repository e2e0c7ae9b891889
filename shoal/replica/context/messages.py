"""Positions of sequences between stages: each rank sends its own ones as plain tensors."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial

from shoal.pytree import Tree, is_marked, map_leaves
from shoal.replica.context.sequence_shard import SequenceContext, SequenceShard
from shoal.replica.context.spec import SequenceSpec

_MARK = "positions of a sequence"


def pack(tree: Tree) -> Tree:
    """Sequences as tuples that can be sent to the same rank of another stage."""
    return map_leaves(
        lambda leaf: isinstance(leaf, SequenceShard),
        lambda leaf: (_MARK, leaf.local, list(astuple(leaf.spec))),
        tree,
    )


def unpack(tree: Tree, context: SequenceContext) -> Tree:
    return map_leaves(
        partial(is_marked, mark=_MARK),
        lambda leaf: context.wrap(leaf[1], SequenceSpec(*leaf[2])),
        tree,
    )
