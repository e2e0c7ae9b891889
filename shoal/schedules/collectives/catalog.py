"""Every algorithm by kind and name, or the user's own. The simplest of a kind is first."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.errors import BadInput
from shoal.runtime.wording import nearest
from shoal.schedules.collectives import direct, doubling, ring, scan, tree
from shoal.schedules.collectives.collective import Collective, rooted_at
from shoal.schedules.collectives.hierarchical import hierarchical_all_reduce, torus_all_reduce
from shoal.schedules.collectives.kinds import KINDS, kind_named
from shoal.schedules.collectives.tree import double_tree_all_reduce
from shoal.schedules.user import is_user_function, load_collective


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of a kind. `for_show`: correct, but never the right choice."""

    kind: str
    name: str
    make: Callable[..., Collective]
    for_show: bool = False

    @property
    def description(self) -> str:
        return inspect.cleandoc(self.make.__doc__ or "")


_FAMILIES: dict[str, dict[str, Callable[..., Collective]]] = {
    "all_reduce": {
        "ring": ring.ring_all_reduce,
        "star": direct.star_all_reduce,
        "tree": tree.tree_all_reduce,
        "double_tree": double_tree_all_reduce,
        "doubling": doubling.doubling_all_reduce,
        "halving": doubling.halving_all_reduce,
        "torus": torus_all_reduce,
        "hierarchical": hierarchical_all_reduce,
        "direct": direct.direct_all_reduce,
        "sequential": direct.sequential_all_reduce,
        "naive": direct.naive_all_reduce,
        "slow_ring": ring.slow_ring_all_reduce,
        "whole_ring": ring.whole_ring_all_reduce,
    },
    "reduce_scatter": {
        "ring": ring.ring_reduce_scatter,
        "halving": doubling.halving_reduce_scatter,
        "direct": direct.direct_reduce_scatter,
    },
    "all_gather": {
        "ring": ring.ring_all_gather,
        "doubling": doubling.doubling_all_gather,
        "bruck": doubling.bruck_all_gather,
        "direct": direct.direct_all_gather,
    },
    "broadcast": {
        "tree": tree.tree_broadcast,
        "star": direct.star_broadcast,
        "ring": ring.ring_broadcast,
        "scatter_gather": tree.scatter_gather_broadcast,
    },
    "reduce": {
        "tree": tree.tree_reduce,
        "star": direct.star_reduce,
        "ring": ring.ring_reduce,
        "scatter_gather": tree.scatter_gather_reduce,
    },
    "scatter": {"tree": tree.tree_scatter, "star": direct.star_scatter},
    "gather": {"tree": tree.tree_gather, "star": direct.star_gather},
    "all_to_all": {
        "shift": direct.shifted_all_to_all,
        "bruck": doubling.bruck_all_to_all,
        "direct": direct.direct_all_to_all,
    },
    "scan": {"hillis_steele": scan.hillis_steele_scan, "chain": scan.chain_scan},
    "exclusive_scan": {
        "hillis_steele": scan.exclusive_hillis_steele_scan,
        "chain": scan.exclusive_chain_scan,
    },
    "barrier": {
        "dissemination": doubling.dissemination_barrier,
        "star": direct.star_barrier,
        "ring": doubling.ring_barrier,
    },
}
_FOR_SHOW = ("sequential", "naive", "slow_ring", "whole_ring")
CATALOG: dict[str, dict[str, Algorithm]] = {
    kind: {name: Algorithm(kind, name, make, name in _FOR_SHOW) for name, make in family.items()}
    for kind, family in _FAMILIES.items()
}
assert list(CATALOG) and set(CATALOG) == set(KINDS)


def kinds() -> list[str]:
    return list(CATALOG)


def algorithms(kind: str) -> list[str]:
    """The names of the algorithms for a kind."""
    return list(CATALOG[kind_named(kind).name])


def algorithm(kind: str, name: str) -> Algorithm:
    """The algorithm of this name; FILE.py:FUNCTION loads the user's own."""
    family = CATALOG[kind_named(kind).name]
    if is_user_function(name):
        return Algorithm(kind, name, load_collective(name))
    if name not in family:
        raise BadInput(f"there is no algorithm {name!r} for {kind}; {nearest(name, family)}")
    return family[name]


def build(kind: str, name: str, ranks: int, root: int = 0, **options: Any) -> Collective:
    """The schedule of an algorithm for a number of ranks.

    Options are the algorithm's own: `node`, `rack`, `inner` and `outer` (a name, or a function
    from ranks to a schedule) for hierarchical, `columns` for torus, `segments` for double_tree,
    `chunks` for the rings that broadcast and reduce.
    """
    entry = algorithm(kind, name)
    if ranks < 1:
        raise BadInput(f"a collective needs at least one rank, not {ranks}")
    if not 0 <= root < ranks:
        raise BadInput(f"the root must be one of the ranks 0 to {ranks - 1}, not {root}")
    if isinstance(options.get("outer"), str):
        options["outer"] = partial(build, kind, options["outer"])
    try:
        made = entry.make(ranks, **options)
    except TypeError as wrong:
        raise BadInput(f"{kind} {name} has no such option: {wrong}") from wrong
    if made.kind != kind:
        raise BadInput(f"{name} is a schedule for {made.kind}, not for {kind}")
    if made.ranks != ranks:
        raise BadInput(f"{name} made a schedule for {made.ranks} ranks, not for {ranks}")
    return rooted_at(made, root) if kind_named(kind).rooted else made
