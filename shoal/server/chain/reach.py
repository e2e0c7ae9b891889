"""Who leaves a chain where two neighbours do not reach each other, though both are alive."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise


def who_leaves(members: Sequence[int], unreachable: Mapping[int, Collection[int]]) -> int | None:
    """The one that most others do not reach, the later in the chain of two alike; None if pushes
    get through.

    `unreachable` is what each member says of the others. Two are apart when both say so: one that
    has died says nothing.
    """
    apart = {
        frozenset((a, b))
        for a in members
        for b in members
        if b in unreachable.get(a, ()) and a in unreachable.get(b, ())
    }
    broken = {member for pair in pairwise(members) if frozenset(pair) in apart for member in pair}
    if not broken:
        return None
    return max(broken, key=lambda m: (sum(m in pair for pair in apart), members.index(m)))
