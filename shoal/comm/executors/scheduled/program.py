"""A schedule for one rank: what it sends, receives and adds, step by step."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property

from shoal.schedules.collectives.collective import Collective


@dataclass
class ProgramStep:
    """One round as one rank sees it; rounds in which it does nothing are left out.

    `sends` and `receives` go by peer: the slots of one message in the order in which they lie
    in it. `local` are (from slot, into slot, reduce) within the rank.
    """

    round: int
    sends: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[int, list[tuple[int, bool]]] = field(default_factory=lambda: defaultdict(list))
    local: list[tuple[int, int, bool]] = field(default_factory=list)
    last_use: list[int] = field(default_factory=list)  # slots that are not used afterwards

    @cached_property
    def read(self) -> set[int]:
        """The slots whose contents of before the round are needed during it."""
        sent = {slot for slots in self.sends.values() for slot in slots}
        return sent | {slot for slot, _, _ in self.local}

    @cached_property
    def contributions(self) -> Counter[int]:
        """How many messages and local copies reach each slot."""
        received = [slot for slots in self.receives.values() for slot, _ in slots]
        return Counter([*received, *(into for _, into, _ in self.local)])

    @property
    def touched(self) -> set[int]:
        received = {slot for slots in self.receives.values() for slot, _ in slots}
        return self.read | received | {into for _, into, _ in self.local}


@dataclass(frozen=True)
class Program:
    """The steps of one rank."""

    collective: Collective
    rank: int
    steps: tuple[ProgramStep, ...]


def compile_for(collective: Collective, rank: int) -> Program:
    """Read the rank's rows out of the schedule's table."""
    table = collective.table
    mine = table.only((table.src == rank) | (table.dst == rank))
    steps: dict[int, ProgramStep] = {}
    columns = (mine.round, mine.src, mine.dst, mine.chunk, mine.into, mine.reduce)
    for number, src, dst, chunk, into, reduce in zip(*(c.tolist() for c in columns), strict=True):
        step = steps.setdefault(number, ProgramStep(number))
        if src == dst:
            step.local.append((chunk, into, reduce))
        elif src == rank:
            step.sends[dst].append(chunk)
        else:
            step.receives[src].append((into, reduce))
    ordered = tuple(steps[number] for number in sorted(steps))
    _mark_last_uses(ordered)
    return Program(collective, rank, ordered)


def _mark_last_uses(steps: tuple[ProgramStep, ...]) -> None:
    seen: set[int] = set()
    for step in reversed(steps):
        fresh = step.touched - seen
        step.last_use = sorted(fresh)
        seen = seen | fresh
