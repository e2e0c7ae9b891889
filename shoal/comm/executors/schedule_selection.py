"""Which schedule a collective runs: the cheapest, a named one, or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shoal.comm.executors.schedule_interpreter import Program, compile_for
from shoal.errors import BadInput
from shoal.schedules.collectives import Collective, in_order, rooted_at
from shoal.schedules.collectives.catalog import build, proven_collective
from shoal.schedules.collectives.cost import Link, cheapest
from shoal.schedules.collectives.kinds import kind_named
from shoal.schedules.collectives.proof import prove
from shoal.schedules.user import is_user_function


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


# a name, or a function from the number of ranks to a Collective, which is proven before its use
Algorithm = str | Callable[[int], Collective] | ForRanks | Ordered
Choice = Mapping[str, Algorithm]  # by kind; a kind that is left open takes the cheapest


class AlgorithmSelector:
    """Selects and keeps the programs of one rank. Every rank selects the same ones."""

    def __init__(self, choice: Choice, rank: int, ranks: int):
        self._rank = rank
        self._ranks = ranks
        self._own: dict[str, Collective] = {}  # schedules of functions
        self._names: dict[str, str] = {}
        self._orders: dict[str, tuple[int, ...]] = {}
        self._programs: dict[tuple[str, str, int], Program] = {}
        for kind, algorithm in choice.items():
            self._settle(kind_named(kind).name, algorithm)

    def is_auto(self, kind: str) -> bool:
        return self._ranks > 1 and kind not in self._own and kind not in self._names

    def program(self, kind: str, num_bytes: int, link: Link, root: int = 0) -> Program:
        """The program for `num_bytes` of data; the size matters for "auto" only."""
        if kind in self._own:
            name = self._own[kind].name
        else:
            name = self._names.get(kind) or cheapest(kind, self._ranks, _rounded(num_bytes), link)
        key = (kind, name, root)
        if key not in self._programs:
            self._programs[key] = compile_for(self._schedule(*key), self._rank)
        return self._programs[key]

    def _schedule(self, kind: str, name: str, root: int) -> Collective:
        if kind in self._own:
            return rooted_at(self._own[kind], root)
        if is_user_function(name):
            return rooted_at(proven_collective(name, kind, self._ranks), root)
        schedule = build(kind, name, self._ranks, root)
        return in_order(schedule, self._orders[kind]) if kind in self._orders else schedule

    def _settle(self, kind: str, algorithm: Algorithm) -> None:
        if isinstance(algorithm, ForRanks):
            algorithm = algorithm.function if algorithm.ranks == self._ranks else "auto"
        elif isinstance(algorithm, Ordered):
            self._orders[kind] = algorithm.order
            algorithm = algorithm.name
        if not isinstance(algorithm, str):
            self._own[kind] = self._proven(kind, algorithm(self._ranks))
        elif is_user_function(algorithm):
            if self._ranks > 1:  # proven before its first use
                self._names[kind] = algorithm
        elif algorithm != "auto":
            build(kind, algorithm, 1)  # refuses a name that the kind does not have
            self._names[kind] = algorithm

    def _proven(self, kind: str, schedule: Collective) -> Collective:
        if (schedule.kind, schedule.ranks) != (kind, self._ranks):
            raise BadInput(
                f"the schedule {schedule.name!r} is for {schedule.kind} over {schedule.ranks} "
                f"ranks, not for {kind} over {self._ranks}"
            )
        prove(schedule)
        return replace(schedule, name=f"{schedule.name} (own)")


def for_subset(choice: Choice, ranks: Sequence[int]) -> Choice:
    """The choice of a group for some of its ranks."""
    return {
        kind: algorithm.among(ranks) if isinstance(algorithm, Ordered) else algorithm
        for kind, algorithm in choice.items()
    }


def _rounded(num_bytes: int) -> int:
    """Up to a power of two, so that few sizes need a decision of their own."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0
