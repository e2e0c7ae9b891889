"""The application of the simulated world: sums of one-hot integers, and what they contain."""

from __future__ import annotations

from typing import NamedTuple


class Push(NamedTuple):
    """Add 4**`number` to a key. The number is unique to (worker, incarnation, sequence)."""

    worker: int
    incarnation: int
    sequence: int
    key: int
    number: int


class Resume(NamedTuple):
    """Eventual consistency: all up to `sequence` has been acknowledged to this worker."""

    worker: int
    incarnation: int
    sequence: int


class Counters:
    """The state of a replica. The table of pushes already counted is part of it."""

    def __init__(self) -> None:
        self.sums = [0, 0]
        self.table: dict[int, tuple[int, int]] = {}  # worker: incarnation, sequence
        self.lost: dict[int, int] = {}  # worker: pushes of its incarnation that are missing

    def apply(self, op: Push | Resume) -> bool:
        """False if pushes before this one are missing: the worker must say where it is."""
        incarnation, sequence = self.table.get(op.worker, (0, 0))
        if (op.incarnation, op.sequence) <= (incarnation, sequence):
            return True
        if op.incarnation > incarnation:
            self.lost[op.worker] = 0
        expected = sequence + 1 if op.incarnation == incarnation else 1
        if isinstance(op, Resume):
            self.lost[op.worker] += op.sequence - expected + 1
        elif op.sequence != expected:
            return False
        else:
            self.sums[op.key] += 4**op.number
        self.table[op.worker] = (op.incarnation, op.sequence)
        return True

    def copy(self) -> Counters:
        other = type(self)()
        other.sums = list(self.sums)
        other.table = dict(self.table)
        other.lost = dict(self.lost)
        return other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counters) and self.__dict__ == other.__dict__

    def __repr__(self) -> str:
        return f"Counters({self.__dict__})"
