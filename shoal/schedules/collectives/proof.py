"""Proves a collective: run with sets instead of numbers, every contribution arrives exactly once.

Every slot holds the set of ranks whose contributions are in it, as the bits of an integer. A
transfer reads the set before its round and joins it to, or puts it in place of, another. A
schedule is refused in the first round where

- a rank sends a slot that it does not hold, or adds to one that it does not hold;
- a contribution would be added twice;
- a slot is overwritten while something else is written to it;
- a rank sends or receives two messages although the schedule claims one port;

or at the end where a rank lacks a contribution, or holds one that it should not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from shoal.errors import CheckFailed
from shoal.schedules.collectives import Collective
from shoal.schedules.collectives.kinds import Where

State = list[dict[int, int]]  # for every rank: slot -> contributions as bits of ranks


class ProofFailed(CheckFailed):
    """A schedule is wrong. `round` counts from 0; it is None if the result at the end is wrong."""

    def __init__(self, collective: Collective, round: int | None, rank: int, what: str):
        self.round = round
        self.rank = rank
        where = "at the end" if round is None else f"in round {round}"
        super().__init__(f"{collective} is wrong: {where} rank {rank} {what}")


def prove(collective: Collective) -> None:
    """Raise `ProofFailed` unless every rank ends with exactly what it should have."""
    _check_names(collective)
    state = initial(collective)
    for _ in states(collective, state):
        pass
    _check_end(collective, state)


def initial(collective: Collective) -> State:
    """What every rank holds before the first round."""
    state: State = [{} for _ in range(collective.ranks)]
    per_unit = collective.chunks_per_unit
    for rank, unit in _holders(collective, collective.pattern.begins):
        for chunk in range(unit * per_unit, (unit + 1) * per_unit):
            state[rank][chunk] = 1 << rank
    return state


def states(collective: Collective, state: State) -> Iterator[State]:
    """The same state object after each round, changed in place."""
    table = collective.table
    columns = (table.src, table.dst, table.chunk, table.into, table.reduce)
    listed = [column.tolist() for column in columns]
    bounds = np.searchsorted(table.round, np.arange(len(table) + 1)).tolist()
    for number, (first, last) in enumerate(pairwise(bounds)):
        of_round = [column[first:last] for column in listed]
        if collective.one_port:
            _check_ports(collective, number, of_round[0], of_round[1])
        _apply(collective, number, state, of_round)
        yield state


def _apply(collective: Collective, number: int, state: State, columns: list[list[int]]) -> None:
    """One round: read everything first, then write."""
    srcs, dsts, chunks, intos, reduces = columns
    values = [state[src].get(chunk) for src, chunk in zip(srcs, chunks, strict=True)]
    replaced: set[tuple[int, int]] = set()
    added: set[tuple[int, int]] = set()
    overlap = collective.pattern.overlap
    for row, (rank, slot, reduce, held) in enumerate(
        zip(dsts, intos, reduces, values, strict=True)
    ):
        if held is None:
            what = f"sends {_slot(collective, chunks[row])} to rank {rank} before it has it"
            raise ProofFailed(collective, number, srcs[row], what)
        key = (rank, slot)
        if key in replaced or (not reduce and key in added):
            what = f"overwrites {_slot(collective, slot)} while something else is written to it"
            raise ProofFailed(collective, number, rank, what)
        if not reduce:
            replaced.add(key)
            state[rank][slot] = held
            continue
        added.add(key)
        present = state[rank].get(slot)
        if present is None:
            what = f"adds to {_slot(collective, slot)} before it has it"
            raise ProofFailed(collective, number, rank, what)
        if present & held and not overlap:
            what = f"adds the contribution of {_ranks(present & held)} to "
            what += f"{_slot(collective, slot)} twice"
            raise ProofFailed(collective, number, rank, what)
        state[rank][slot] = present | held


def _check_ports(collective: Collective, number: int, srcs: list[int], dsts: list[int]) -> None:
    sends: dict[int, int] = {}
    receives: dict[int, int] = {}
    for src, dst in zip(srcs, dsts, strict=True):
        if src == dst:
            continue
        if sends.setdefault(src, dst) != dst:
            what = f"sends to ranks {sends[src]} and {dst}, and claims one port"
            raise ProofFailed(collective, number, src, what)
        if receives.setdefault(dst, src) != src:
            what = f"receives from ranks {receives[dst]} and {src}, and claims one port"
            raise ProofFailed(collective, number, dst, what)


def _check_end(collective: Collective, state: State) -> None:
    kind = collective.pattern
    per_unit = collective.chunks_per_unit
    sources: dict[int, int] = defaultdict(int)
    for rank, unit in _holders(collective, kind.begins):
        sources[unit] |= 1 << rank
    for rank, unit in _holders(collective, kind.ends):
        wanted = sources[unit]
        if kind.prefix is not None:
            wanted &= (1 << rank + kind.prefix) - 1
        for chunk in range(unit * per_unit, (unit + 1) * per_unit):
            held = state[rank].get(chunk, 0)
            if held == wanted:
                continue
            lacks = wanted & ~held
            what = f"{'lacks' if lacks else 'holds'} the contribution of "
            what += f"{_ranks(lacks or held & ~wanted)} in chunk {chunk}"
            what += "" if lacks else ", which should not be there"
            raise ProofFailed(collective, None, rank, what)


def _holders(collective: Collective, where: Where) -> Iterator[tuple[int, int]]:
    """The pairs of rank and unit for which `where` holds."""
    ranks = collective.ranks
    units = collective.pattern.units(collective.ranks)
    held = where(np.arange(ranks)[:, None], np.arange(units)[None, :], ranks, collective.root)
    pairs = np.nonzero(np.broadcast_to(held, (ranks, units)))
    yield from zip(pairs[0].tolist(), pairs[1].tolist(), strict=True)


def _check_names(collective: Collective) -> None:
    """Ranks and slots exist, and a chunk only goes to a slot of its own size."""
    table = collective.table
    ranks = collective.ranks
    wrong = table.chunk % collective.chunks != table.into % collective.chunks
    slots = collective.slots
    limits = ((table.src, ranks), (table.dst, ranks), (table.chunk, slots), (table.into, slots))
    for column, limit in limits:
        wrong |= (column < 0) | (column >= limit)
    if not wrong.any():
        return
    row = int(wrong.argmax())
    columns = (table.round, table.src, table.dst, table.chunk, table.into)
    number, src, dst, chunk, into = (int(column[row]) for column in columns)
    for rank in (src, dst):
        if not 0 <= rank < ranks:
            raise ProofFailed(collective, number, rank, f"takes part, and there are {ranks} ranks")
    what = f"sends slot {chunk} to rank {dst} into slot {into}, which does not fit it"
    raise ProofFailed(collective, number, src, what)


def _slot(collective: Collective, slot: int) -> str:
    chunks = collective.chunks
    return f"chunk {slot}" if slot < chunks else f"scratch slot {slot - chunks}"


def _ranks(bits: int) -> str:
    ranks = [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
    listed = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
