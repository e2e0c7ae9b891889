"""Every algorithm by kind and name, or the user's own. The simplest of a kind is first."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.errors import BadInput, CheckFailed
from shoal.runtime.wording import nearest
from shoal.schedules.collectives import (
    Collective,
    direct,
    doubling,
    hierarchical,
    ring,
    rooted_at,
    tree,
)
from shoal.schedules.collectives.kinds import KINDS, kind_named
from shoal.schedules.collectives.proof import prove
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


# the function NAME_KIND of a module of this folder makes each of them
_MODULES = (ring, direct, tree, doubling, hierarchical)
_FAMILIES = {
    "all_reduce": "ring star tree double_tree doubling halving torus hierarchical direct "
    "sequential naive slow_ring whole_ring",
    "reduce_scatter": "ring halving direct",
    "all_gather": "ring doubling bruck direct",
    "broadcast": "tree star ring scatter_gather",
    "reduce": "tree star ring scatter_gather",
    "scatter": "tree star",
    "gather": "tree star",
    "all_to_all": "shift bruck direct",
    "scan": "hillis_steele chain",
    "exclusive_scan": "hillis_steele chain",
    "barrier": "dissemination star ring",
}
_FOR_SHOW = ("sequential", "naive", "slow_ring", "whole_ring")


def _made_here(kind: str, name: str) -> Algorithm:
    homes = [module for module in _MODULES if hasattr(module, f"{name}_{kind}")]
    return Algorithm(kind, name, getattr(homes[0], f"{name}_{kind}"), name in _FOR_SHOW)


CATALOG: dict[str, dict[str, Algorithm]] = {
    kind: {name: _made_here(kind, name) for name in names.split()}
    for kind, names in _FAMILIES.items()
}
assert set(CATALOG) == set(KINDS)


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


def proven_collective(name: str, kind: str, ranks: int) -> Collective:
    """The schedule of FILE.py:FUNCTION; one that the proof rejects is a `BadInput`."""
    collective = build(kind, name, ranks)
    try:
        prove(collective)
    except CheckFailed as error:
        raise BadInput(f"{name} cannot be used: {error}") from error
    return collective
