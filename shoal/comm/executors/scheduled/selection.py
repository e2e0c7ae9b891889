"""Which schedule a collective runs: the cheapest, a named one, or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from shoal.comm.executors.scheduled.program import Program, compile_for
from shoal.errors import BadInput
from shoal.schedules.collectives.catalog import CATALOG, build
from shoal.schedules.collectives.collective import Collective, rooted_at
from shoal.schedules.collectives.cost import Link, cheapest
from shoal.schedules.collectives.kinds import kind_named, nearest
from shoal.schedules.collectives.proof import prove

Maker = Callable[[int], Collective]
Choosable = str | Maker | Mapping[str, str | Maker]
AUTO = "auto"


class Chooser:
    """Picks and keeps the programs of one rank. Every rank picks the same, from the same facts.

    `algorithm` is "auto"; or a name, for the kinds that know it; or a function from ranks to a
    `Collective`, for its kind; or any of these by kind. What is left open is "auto".
    """

    def __init__(self, algorithm: Choosable, rank: int, ranks: int):
        self._rank = rank
        self._ranks = ranks
        self._own: dict[str, Collective] = {}
        self._named: dict[str, str] = {}
        self._programs: dict[tuple[str, str, int], Program] = {}
        self._settle(algorithm)

    def is_auto(self, kind: str) -> bool:
        return self._ranks > 1 and kind not in self._own and kind not in self._named

    def program(self, kind: str, num_bytes: int, link: Link, root: int = 0) -> Program:
        """The program for `num_bytes` of data; the size only matters where the choice is open."""
        name = self._named.get(kind, AUTO)
        if kind in self._own:
            name = self._own[kind].name
        elif name == AUTO:
            name = cheapest(kind, self._ranks, _rounded_up(num_bytes), link)
        key = (kind, name, root)
        if key not in self._programs:
            self._programs[key] = compile_for(self._schedule(*key), self._rank)
        return self._programs[key]

    def _schedule(self, kind: str, name: str, root: int) -> Collective:
        if kind in self._own:
            return rooted_at(self._own[kind], root)
        return build(kind, name, self._ranks, root)

    def _settle(self, algorithm: Choosable) -> None:
        if isinstance(algorithm, Mapping):
            for kind, choice in algorithm.items():
                self._settle_one(kind_named(kind).name, choice)
        elif isinstance(algorithm, str):
            known = [kind for kind, family in CATALOG.items() if algorithm in family]
            if algorithm != AUTO and not known:
                names = dict.fromkeys(name for family in CATALOG.values() for name in family)
                raise BadInput(f"there is no algorithm {algorithm!r}; {nearest(algorithm, names)}")
            self._named = dict.fromkeys(known, algorithm)
        else:
            self._settle_one(None, algorithm)

    def _settle_one(self, kind: str | None, choice: str | Maker) -> None:
        if not isinstance(choice, str):
            own = self._proven(choice)
            if kind is not None and own.kind != kind:
                raise BadInput(f"the schedule {own.name!r} is for {own.kind}, not for {kind}")
            self._own[own.kind] = own
        elif kind is not None and choice != AUTO:
            build(kind, choice, 1)
            self._named[kind] = choice

    def _proven(self, maker: Maker) -> Collective:
        own = maker(self._ranks)
        if own.ranks != self._ranks:
            raise BadInput(
                f"the schedule {own.name!r} is for {own.ranks} ranks, and the group has "
                f"{self._ranks}"
            )
        prove(own)
        return replace(own, name=f"{own.name} (own)")


def _rounded_up(num_bytes: int) -> int:
    """To a power of two, so that few sizes need a decision of their own."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0
