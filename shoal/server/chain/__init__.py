"""Chain replication as a pure state machine: no clock, threads, sockets or torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Annotated, Any

import msgspec

Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ChainConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The members of a chain in one epoch: copy numbers, head first, tail last.

    An incarnation is one life of a copy: a copy that starts again, or gives up its state,
    takes a larger number and is then no member until it has been added. Without `incarnations`
    all are 0. The coordinator holds one configuration; each one follows from the previous by
    compare-and-set, with the next epoch: it lacks some members, or has one more behind the tail.
    """

    epoch: Number
    members: tuple[Number, ...]
    incarnations: tuple[Number, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.members)) != len(self.members):
            raise ValueError(f"a member is twice in the chain {self.members}")
        if self.incarnations and len(self.incarnations) != len(self.members):
            raise ValueError(f"{self.incarnations} are not the incarnations of {self.members}")

    @property
    def head(self) -> int | None:
        return self.members[0] if self.members else None

    @property
    def tail(self) -> int | None:
        return self.members[-1] if self.members else None

    def has(self, member: int, incarnation: int) -> bool:
        return member in self.members and self.incarnation_of(member) == incarnation

    def incarnation_of(self, member: int) -> int:
        return self.incarnations[self.members.index(member)] if self.incarnations else 0

    def without(self, lost: Collection[int] = ()) -> ChainConfig:
        """The next epoch, less the members that are lost."""
        kept = tuple(m for m in self.members if m not in lost)
        return ChainConfig(self.epoch + 1, kept, tuple(map(self.incarnation_of, kept)))

    def plus(self, member: int, incarnation: int) -> ChainConfig:
        """The next epoch, with one more member behind the tail."""
        same = self.without()
        return ChainConfig(same.epoch, (*same.members, member), (*same.incarnations, incarnation))


NO_CONFIG = ChainConfig(0, ())  # before the first one is known


class Entry(msgspec.Struct, frozen=True):
    """An operation at its place in the log, from 1 on. The chain never looks into `op`."""

    position: int
    op: Any


class EntryLog:
    """The entries after `base`, without a gap. `weight` is what they take up together."""

    def __init__(self, base: int = 0):
        self.base = base
        self.weight = 0
        self._entries: deque[Entry] = deque()
        self._weights: deque[int] = deque()

    @property
    def end(self) -> int:
        return self.base + len(self._entries)

    def append(self, entry: Entry, weight: int = 1) -> None:
        assert entry.position == self.end + 1, f"{entry.position} does not follow {self.end}"
        self._entries.append(entry)
        self._weights.append(weight)
        self.weight += weight

    def between(self, after: int, upto: int) -> tuple[Entry, ...]:
        """Entries `after` + 1 to `upto`."""
        assert self.base <= after, f"entries up to {self.base} are gone, {after + 1} is wanted"
        return tuple(self._entries[i - self.base] for i in range(after, min(upto, self.end)))

    def drop(self, upto: int) -> None:
        while self._entries and self._entries[0].position <= upto:
            self._entries.popleft()
            self.weight -= self._weights.popleft()
            self.base += 1


def take(entries: deque[Entry], upto: int | None = None) -> Entry | None:
    """The next one, if its position is no later than `upto`."""
    if not entries or (upto is not None and entries[0].position > upto):
        return None
    return entries.popleft()
