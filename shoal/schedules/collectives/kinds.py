"""The kinds of collectives: who has what at the start, and who must have what at the end.

kind            starts with            ends with                       p = 3, root 0
broadcast       root: x                all: x                          x . .  ->  x x x
reduce          rank r: x_r            root: sum                       a b c  ->  S . .
all_reduce      rank r: x_r            all: sum                        a b c  ->  S S S
scatter         root: p pieces         rank r: piece r
gather          rank r: piece r        root: p pieces
all_gather      rank r: piece r        all: p pieces
reduce_scatter  rank r: x_r            rank r: piece r of the sum
all_to_all      rank r: p pieces       rank r: piece r of every rank
scan            rank r: x_r            rank r: x_0 + … + x_r
exclusive_scan  rank r: x_r            rank r: x_0 + … + x_(r-1), rank 0: nothing
barrier         rank r: has arrived    all: all have arrived
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import BadInput
from shoal.runtime.wording import nearest

Where = Callable[[Any, Any, int, int], Any]  # (rank, unit, ranks, root) -> bool, or arrays of it


@dataclass(frozen=True)
class CollectiveKind:
    """One kind of collective. `begins` and `ends` say which rank holds which unit."""

    name: str
    units: Callable[[int], int]
    begins: Where
    ends: Where
    reduces: bool = False  # contributions of several ranks are combined
    prefix: int | None = None  # scan: rank r wants the contributions of ranks < r + prefix
    overlap: bool = False  # a contribution may arrive twice without harm
    rooted: bool = False
    bound: Callable[[int], float] = lambda p: (p - 1) / p  # least bytes of the busiest rank, in V

    def redundant(self, ranks: int) -> float:
        """What the ranks hold at the end, in V, beyond one copy of the result; in place.

        Every rank has a vector, of which it needs one copy between all of them. Where one rank
        has a vector and the others pieces, each piece is held twice but for that rank's own.
        """
        if self.prefix is not None or self.overlap or self.units(ranks) > ranks:
            return 0.0  # a result of its own on every rank
        if self.rooted and self.units(ranks) > 1:
            return (ranks - 1) / ranks
        return float(ranks - 1)


def _all(rank: Any, unit: Any, ranks: int, root: int) -> NDArray[np.bool_]:
    return np.broadcast_to(np.True_, np.broadcast_shapes(np.shape(rank), np.shape(unit)))


def _root(rank: Any, unit: Any, ranks: int, root: int) -> Any:
    return (rank == root) & (unit == unit)


def _later(rank: Any, unit: Any, ranks: int, root: int) -> Any:
    return (rank > 0) & (unit == unit)


def _owner(rank: Any, unit: Any, ranks: int, root: int) -> Any:
    return rank == unit


def _one(p: int) -> int:
    return 1


def _each(p: int) -> int:
    return p


def _whole(p: int) -> float:
    return float(p > 1)


_KINDS = [
    CollectiveKind("all_reduce", _one, _all, _all, reduces=True, bound=lambda p: 2 * (p - 1) / p),
    CollectiveKind("reduce_scatter", _each, _all, _owner, reduces=True),
    CollectiveKind("all_gather", _each, _owner, _all),
    CollectiveKind("broadcast", _one, _root, _all, rooted=True, bound=_whole),
    CollectiveKind("reduce", _one, _all, _root, reduces=True, rooted=True, bound=_whole),
    CollectiveKind("scatter", _each, _root, _owner, rooted=True),
    CollectiveKind("gather", _each, _owner, _root, rooted=True),
    CollectiveKind(
        "all_to_all",
        lambda p: p * p,
        lambda rank, unit, ranks, root: rank == unit // ranks,
        lambda rank, unit, ranks, root: rank == unit % ranks,
    ),
    CollectiveKind("scan", _one, _all, _all, reduces=True, prefix=1, bound=_whole),
    CollectiveKind("exclusive_scan", _one, _all, _later, reduces=True, prefix=0, bound=_whole),
    CollectiveKind("barrier", _one, _all, _all, reduces=True, overlap=True, bound=lambda p: 0.0),
]
KINDS = {kind.name: kind for kind in _KINDS}
_SYNONYMS = {
    "a prefix sum is scan": "prefix_sum prefix cumsum inclusive_scan",
    "an exclusive prefix sum is exclusive_scan": "exscan",
    "did you mean 'broadcast'?": "bcast",
    "did you mean 'all_reduce'?": "allreduce",
    "did you mean 'all_gather'?": "allgather",
    "did you mean 'all_to_all'?": "alltoall",
    "a piece for every rank from every rank is all_to_all": "transpose",
    "waiting for all ranks is barrier": "synchronize",
    "a message between two ranks is group.send and group.recv, and no collective": (
        "push pull send recv receive p2p"
    ),
}


def kind_named(name: str) -> CollectiveKind:
    if name not in KINDS:
        word = name.lower().replace("-", "_")
        meant = (hint for hint, words in _SYNONYMS.items() if word in words.split())
        hint = next(meant, None) or nearest(name, KINDS)
        raise BadInput(f"there is no collective {name!r}; {hint}")
    return KINDS[name]
