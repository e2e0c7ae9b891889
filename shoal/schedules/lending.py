"""Memory that is lent to buckets of gradients while they are on their way: arithmetic alone.

Two buckets get memory at a time, small ones more. Large memory that comes back is kept for the
next bucket: the pages of new memory would have to be cleared first, in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ON_THE_WAY = 2
REUSED_BYTES = 1 << 20  # memory of at least this size is kept
_STEPS = 2  # the second one finds what the first has left


class FilledBucket(NamedTuple):
    """Elements of a bucket, in the order in which backward fills them."""

    size: float
    waits: float  # at the parameters, when it is full
    is_own: bool  # it has memory of its own, once in a step


def must_settle(sizes: Sequence[float], size: float, room: float) -> bool:
    """Whether buckets of these sizes leave a further one no room, of so many elements in all."""
    return len(sizes) >= ON_THE_WAY and sum(sizes) + size > room


def fitting(sizes: Sequence[float], size: float) -> int | None:
    """Which of the kept pieces of memory is the smallest that is large enough."""
    enough = [number for number, kept in enumerate(sizes) if kept >= size]
    return min(enough, key=sizes.__getitem__, default=None)


def times_settled(buckets: Sequence[float], room: float) -> int:
    """How often a backward waits for a bucket that is on its way, since the next has no room."""
    on_the_way: list[float] = []
    times = 0
    for size in buckets:
        times += must_settle(on_the_way, size, room)
        while must_settle(on_the_way, size, room):
            on_the_way.pop(0)
        on_the_way.append(size)
    return times


def most_lent(buckets: Sequence[FilledBucket], passes: int, room: float, reused: float) -> float:
    """Elements of lent and kept memory and of gradients that wait, at the worst moment of a step.

    `passes` are backward passes of a step. Memory of at least `reused` elements is kept.
    """
    lender = _Lender(room, reused)
    most = 0.0
    for _ in range(_STEPS):
        for number in range(passes):
            for size, waits, is_own in buckets:
                most = max(most, lender.held + waits)
                lender.lend(size, 0.0 if is_own and number == 0 else size)
                most = max(most, lender.held + waits)
        lender.settle_all()
    return most


class _Lender:
    def __init__(self, room: float, reused: float):
        self._room = room
        self._reused = reused
        self._sizes: list[float] = []
        self._lent: list[float] = []
        self._kept: list[float] = []

    @property
    def held(self) -> float:
        return sum(self._lent) + sum(self._kept)

    def lend(self, size: float, needed: float) -> None:
        while must_settle(self._sizes, size, self._room):
            self._settle()
        self._sizes.append(size)
        self._lent.append(self._memory(needed) if needed else 0.0)

    def settle_all(self) -> None:
        while self._sizes:
            self._settle()

    def _settle(self) -> None:
        self._sizes.pop(0)
        memory = self._lent.pop(0)
        if memory >= self._reused:
            self._kept.append(memory)

    def _memory(self, needed: float) -> float:
        number = fitting(self._kept, needed)
        if number is not None:
            return self._kept.pop(number)
        if needed >= self._reused:
            self._kept.clear()
        return needed
