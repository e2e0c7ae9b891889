"""Which schedule a collective runs: the cheapest, a named one, or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shoal.comm.executors.scheduled.interpreter import Program, compile_for
from shoal.errors import BadInput
from shoal.runtime.wording import nearest
from shoal.schedules.collectives.catalog import CATALOG, build
from shoal.schedules.collectives.collective import Collective, in_order, rooted_at
from shoal.schedules.collectives.cost import Link, cheapest
from shoal.schedules.collectives.kinds import kind_named
from shoal.schedules.collectives.proof import prove
from shoal.schedules.user import is_user_function
from shoal.schedules.user_proof import proven_collective

# a user's own schedule: from the number of ranks to a Collective
ScheduleFunction = Callable[[int], Collective]


class ForRanks(NamedTuple):
    """A user's FILE.py:FUNCTION for groups of `ranks` ranks; groups of other sizes use "auto"."""

    function: str
    ranks: int


class Ordered(NamedTuple):
    """A named algorithm whose rank i is rank `order[i]`: neighbours of a ring are in one rack."""

    name: str
    order: tuple[int, ...]

    def among(self, ranks: Sequence[int]) -> Ordered:
        """For some of the ranks, which are counted from 0 again."""
        return Ordered(self.name, tuple(ranks.index(rank) for rank in self.order if rank in ranks))


Algorithm = str | ScheduleFunction | ForRanks | Ordered
AlgorithmChoice = str | ScheduleFunction | Mapping[str, Algorithm]
AUTO = "auto"


class AlgorithmSelector:
    """Selects and keeps the programs of one rank. Every rank selects the same ones.

    The choice is "auto"; or a name, for the kinds that have such an algorithm; or a function from
    the number of ranks to a `Collective`, for its kind; or any of these by kind. A kind that is
    left open is "auto". A function is called and its schedule is proven here, before any use.
    """

    def __init__(self, choice: AlgorithmChoice, rank: int, ranks: int):
        self._rank = rank
        self._ranks = ranks
        self._user_schedules: dict[str, Collective] = {}
        self._names: dict[str, str] = {}
        self._orders: dict[str, tuple[int, ...]] = {}
        self._programs: dict[tuple[str, str, int], Program] = {}
        self._settle(choice)

    def is_auto(self, kind: str) -> bool:
        return self._ranks > 1 and kind not in self._user_schedules and kind not in self._names

    def program(self, kind: str, num_bytes: int, link: Link, root: int = 0) -> Program:
        """The program for `num_bytes` of data; the size matters for "auto" only."""
        name = self._names.get(kind, AUTO)
        if kind in self._user_schedules:
            name = self._user_schedules[kind].name
        elif name == AUTO:
            name = cheapest(kind, self._ranks, _rounded_up(num_bytes), link)
        key = (kind, name, root)
        if key not in self._programs:
            self._programs[key] = compile_for(self._schedule(*key), self._rank)
        return self._programs[key]

    def _schedule(self, kind: str, name: str, root: int) -> Collective:
        if kind in self._user_schedules:
            return rooted_at(self._user_schedules[kind], root)
        if is_user_function(name):
            return rooted_at(proven_collective(name, kind, self._ranks), root)
        schedule = build(kind, name, self._ranks, root)
        return in_order(schedule, self._orders[kind]) if kind in self._orders else schedule

    def _settle(self, choice: AlgorithmChoice) -> None:
        if isinstance(choice, Mapping):
            for kind, algorithm in choice.items():
                self._settle_kind(kind_named(kind).name, algorithm)
        elif isinstance(choice, str):
            self._names = dict.fromkeys(_kinds_with(choice), choice)
        else:
            self._add_function(None, choice)

    def _settle_kind(self, kind: str, algorithm: Algorithm) -> None:
        if isinstance(algorithm, ForRanks):
            algorithm = algorithm.function if algorithm.ranks == self._ranks else AUTO
        elif isinstance(algorithm, Ordered):
            self._orders[kind] = algorithm.order
            algorithm = algorithm.name
        if not isinstance(algorithm, str):
            self._add_function(kind, algorithm)
        elif is_user_function(algorithm):
            if self._ranks > 1:  # proven before its first use
                self._names[kind] = algorithm
        elif algorithm != AUTO:
            build(kind, algorithm, 1)  # refuses a name that the kind does not have
            self._names[kind] = algorithm

    def _add_function(self, kind: str | None, function: ScheduleFunction) -> None:
        schedule = self._proven(function)
        if kind is not None and schedule.kind != kind:
            raise BadInput(f"the schedule {schedule.name!r} is for {schedule.kind}, not for {kind}")
        self._user_schedules[schedule.kind] = schedule

    def _proven(self, function: ScheduleFunction) -> Collective:
        schedule = function(self._ranks)
        if schedule.ranks != self._ranks:
            raise BadInput(
                f"the schedule {schedule.name!r} is for {schedule.ranks} ranks, and the group has "
                f"{self._ranks}"
            )
        prove(schedule)
        return replace(schedule, name=f"{schedule.name} (own)")


def for_subset(choice: AlgorithmChoice, ranks: Sequence[int]) -> AlgorithmChoice:
    """The choice of a group for some of its ranks."""
    if not isinstance(choice, Mapping):
        return choice
    return {
        kind: algorithm.among(ranks) if isinstance(algorithm, Ordered) else algorithm
        for kind, algorithm in choice.items()
    }


def _kinds_with(name: str) -> list[str]:
    kinds = [kind for kind, family in CATALOG.items() if name in family]
    if name != AUTO and not kinds:
        names = dict.fromkeys(name for family in CATALOG.values() for name in family)
        raise BadInput(f"there is no algorithm {name!r}; {nearest(name, names)}")
    return kinds


def _rounded_up(num_bytes: int) -> int:
    """To a power of two, so that few sizes need a decision of their own."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0
