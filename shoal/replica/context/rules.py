"""Which operations of torch are computed on the positions that are here, and by which rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.comm.group import Group
from shoal.replica.context import (
    attention,
    elementwise,
    indexing,
    losses,
    metadata,
    products,
    reductions,
    views,
)
from shoal.replica.context.sequence_shard import SequenceCall, SequenceContext

Rule = Callable[[SequenceCall], Any]

_RULES: dict[str, Rule] = {
    **metadata.RULES,
    **elementwise.RULES,
    **views.RULES,
    **indexing.RULES,
    **reductions.RULES,
    **products.RULES,
    **losses.RULES,
    **attention.RULES,
}


def sequence_context(
    group: Group, say: Callable[[str], None] = lambda sentence: None
) -> SequenceContext:
    """The ranks of a group as those that share sequences."""
    return SequenceContext(group, rule_for, say)


def rule_for(operation: SequenceCall) -> Rule | None:
    """A rule returns NotImplemented where it cannot do without all positions."""
    return _RULES.get(operation.name) or _RULES.get(operation.base_name)
