"""Collectives as data: rounds of transfers; built, proven and priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shoal.errors import BadInput
from shoal.schedules.collectives.kinds import CollectiveKind, kind_named
from shoal.schedules.collectives.transfer_table import Transfer, TransferTable, from_rounds

__all__ = ["Collective", "Transfer", "in_order", "rooted_at"]


@dataclass(frozen=True)
class Collective:
    """A schedule with a name. `one_port` claims one message out and one in per rank and round.

    `same_bits` says that all ranks add in the same order, so that results that ought to be
    equal are equal to the last bit.
    """

    name: str
    ranks: int
    chunks: int
    rounds: Sequence[Sequence[Transfer]]
    kind: str = "all_reduce"
    root: int = 0
    one_port: bool = False
    scratch: int = 0
    same_bits: bool = True

    def __post_init__(self) -> None:
        units = self.pattern.units(self.ranks)
        if self.ranks < 1 or self.chunks < 1 or self.chunks % units:
            raise BadInput(
                f"{self.kind} over {self.ranks} ranks needs a multiple of {units} chunks, "
                f"and {self.name} has {self.chunks}"
            )
        if not isinstance(self.rounds, TransferTable):
            object.__setattr__(self, "rounds", from_rounds(self.rounds))

    @property
    def table(self) -> TransferTable:
        assert isinstance(self.rounds, TransferTable)
        return self.rounds

    @property
    def pattern(self) -> CollectiveKind:
        return kind_named(self.kind)

    @property
    def chunks_per_unit(self) -> int:
        return self.chunks // self.pattern.units(self.ranks)

    @property
    def slots(self) -> int:
        return self.chunks + self.scratch

    def chunk_bytes(self, num_bytes: float) -> float:
        """The bytes of one chunk where a rank's vector has `num_bytes`; a barrier has none."""
        if self.kind == "barrier":
            return 0.0
        copies = self.ranks if self.kind == "all_to_all" else 1
        return num_bytes * copies / self.chunks

    def __str__(self) -> str:
        return f"{self.kind} {self.name} over {self.ranks} ranks"


def rooted_at(collective: Collective, root: int) -> Collective:
    """The same schedule with its ranks rotated, so that `root` takes the role of rank 0."""
    if root == collective.root:
        return collective
    ranks = collective.ranks
    per_unit = collective.chunks_per_unit
    turn = (np.arange(ranks) + root - collective.root) % ranks
    slots = np.arange(collective.slots)
    if collective.pattern.units(ranks) == ranks and ranks > 1:
        unit, offset = np.divmod(slots[: collective.chunks], per_unit)
        slots[: collective.chunks] = turn[unit] * per_unit + offset
    return replace(collective, root=root, rounds=collective.table.relabelled(turn, slots))


def in_order(collective: Collective, order: Sequence[int]) -> Collective:
    """The same schedule with rank `order[i]` in the role of rank i, for kinds of one unit."""
    if collective.pattern.units(collective.ranks) != 1 or collective.ranks == 1:
        return collective
    roles = np.asarray(order)
    table = collective.table.relabelled(roles, np.arange(collective.slots))
    return replace(collective, root=int(roles[collective.root]), rounds=table)


SEGMENT_BYTES = 4 << 20  # smaller ones cost more in messages than they hide
_MOST_SEGMENTS = 64


def segments_for(chunk_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> int:
    return max(1, min(_MOST_SEGMENTS, -(-chunk_bytes // segment_bytes)))
