"""Where an MSCCL program keeps the chunks of a collective.

A GPU has three buffers: input `i`, output `o` and scratch `s`, counted in chunks. Where a kind
gives every rank a piece, the smaller of input and output holds that piece alone:

kind                             begins with           ends with
all_reduce broadcast reduce      i: the vector         o: the vector
all_gather gather                i: the rank's piece   o: all pieces
reduce_scatter scatter           i: all pieces         o: the rank's piece
all_to_all                       i: a piece for each   o: a piece of each

In place the two overlap: the piece is a part of the other buffer. Scans and barriers have no name
in the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import BadInput
from shoal.schedules.collectives.kinds import kind_named

NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "all_to_all": "alltoall",
}
KIND_OF = {name: kind for kind, name in NAMES.items()} | {"reducescatter": "reduce_scatter"}
_PIECES_OUT = ("reduce_scatter", "scatter")
_PIECES_IN = ("all_gather", "gather")


class Location(NamedTuple):
    """A chunk of a buffer of one GPU."""

    buffer: str
    offset: int

    def __str__(self) -> str:
        return f"{self.buffer}[{self.offset}]"


@dataclass(frozen=True)
class BufferLayout:
    """The buffers of one collective; `chunks` counts as `Collective.chunks` does."""

    kind: str
    ranks: int
    chunks: int
    root: int
    in_place: bool

    @property
    def per_unit(self) -> int:
        return self.chunks // kind_named(self.kind).units(self.ranks)

    @property
    def per_loop(self) -> int:
        """`nchunksperloop`: the chunks of the larger buffer."""
        return self.chunks // self.ranks if self.kind == "all_to_all" else self.chunks

    @property
    def sizes(self) -> dict[str, int]:
        """Chunks of the input and of the output."""
        piece = self.chunks // self.ranks
        return {
            "i": piece if self.kind in (*_PIECES_IN, "all_to_all") else self.chunks,
            "o": piece if self.kind in (*_PIECES_OUT, "all_to_all") else self.chunks,
        }

    def begin(self, rank: int, chunk: int) -> Location | None:
        """Where a rank has this chunk at the start."""
        unit, offset = divmod(chunk, self.per_unit)
        if not kind_named(self.kind).begins(rank, unit, self.ranks, self.root):
            return None
        if self.kind in _PIECES_IN:
            return self.physical(rank, Location("i", offset))
        if self.kind == "all_to_all":
            return self.physical(rank, Location("i", unit % self.ranks * self.per_unit + offset))
        return self.physical(rank, Location("i", chunk))

    def end(self, rank: int, chunk: int) -> Location | None:
        """Where a rank must have this chunk at the end."""
        unit, offset = divmod(chunk, self.per_unit)
        if not kind_named(self.kind).ends(rank, unit, self.ranks, self.root):
            return None
        if self.kind in _PIECES_OUT:
            return self.physical(rank, Location("o", offset))
        if self.kind == "all_to_all":
            return self.physical(rank, Location("o", unit // self.ranks * self.per_unit + offset))
        return self.physical(rank, Location("o", chunk))

    def physical(self, rank: int, location: Location) -> Location:
        """The one name of a location that has two in place."""
        buffer, offset = location
        if not self.in_place or buffer == "s":
            return location
        if self.kind in _PIECES_IN:
            holds_all = self.kind == "all_gather" or rank == self.root
            inside = buffer == "i" and holds_all
            return Location("o", rank * self.per_unit + offset) if inside else location
        if self.kind in _PIECES_OUT:
            holds_all = self.kind == "reduce_scatter" or rank == self.root
            inside = buffer == "o" and holds_all
            return Location("i", rank * self.per_unit + offset) if inside else location
        return Location("i", offset)


def check_name(kind: str) -> str:
    """The name of a kind in the format."""
    if kind not in NAMES:
        raise BadInput(
            f"MSCCL has no name for {kind}: its files can hold {', '.join(NAMES)}, and no scan "
            "or barrier"
        )
    return NAMES[kind]
