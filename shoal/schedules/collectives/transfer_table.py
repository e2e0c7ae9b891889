"""The transfers of a schedule as columns of numbers, so that 1,024 ranks are cheap.

A ring over 1,024 ranks has two million transfers. As Python objects they would take seconds to
make and gigabytes to hold; as columns they take milliseconds. A `TransferTable` still reads like a
tuple of rounds: `table[3]` is the fourth round, a tuple of `Transfer`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]
_COLUMNS = ("round", "src", "dst", "chunk", "into", "reduce")


@dataclass(frozen=True, slots=True)
class Transfer:
    """`src` sends its slot `chunk` to `dst`, which adds it to its own or puts it in its place.

    The slot at the receiver is `into`, or the one of the same number where that is None. A
    transfer with `src` = `dst` is a local copy or addition and costs nothing on the wire.
    """

    src: int
    dst: int
    chunk: int
    reduce: bool
    into: int | None = None


@dataclass(frozen=True, eq=False)
class TransferTable(Sequence[tuple[Transfer, ...]]):
    """Rows sorted by round; all columns have the same length."""

    num_rounds: int
    round: Ints
    src: Ints
    dst: Ints
    chunk: Ints
    into: Ints
    reduce: Bools

    def __len__(self) -> int:
        return self.num_rounds

    def __getitem__(self, index: int | slice) -> Any:
        return tuple(self)[index]

    def __iter__(self) -> Iterator[tuple[Transfer, ...]]:
        bounds = np.searchsorted(self.round, np.arange(len(self) + 1)).tolist()
        columns = (self.src, self.dst, self.chunk, self.reduce, self.into)
        for first, last in itertools.pairwise(bounds):
            listed = [column[first:last].tolist() for column in columns]
            yield tuple(
                Transfer(src, dst, chunk, reduce, None if into == chunk else into)
                for src, dst, chunk, reduce, into in zip(*listed, strict=True)
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(tuple(r) for r in other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    @property
    def num_transfers(self) -> int:
        return int(self.round.size)

    def then(self, *later: TransferTable) -> TransferTable:
        """This table, and after its last round the rounds of the others."""
        tables = []
        start = 0
        for table in (self, *later):
            tables.append(replace(table, round=table.round + np.int32(start)))
            start += table.num_rounds
        return _merged(tables, start)

    def beside(self, *others: TransferTable) -> TransferTable:
        """All tables at the same time: their rounds with the same number become one."""
        tables = (self, *others)
        return _merged(tables, max(table.num_rounds for table in tables))

    def reversed(self, reduce: bool) -> TransferTable:
        """Last round first, every transfer reversed: broadcast to reduce."""
        turned = replace(
            self,
            round=np.int32(self.num_rounds - 1) - self.round,
            src=self.dst,
            dst=self.src,
            chunk=self.into,
            into=self.chunk,
            reduce=np.full_like(self.reduce, reduce),
        )
        return _merged([turned], self.num_rounds)

    def relabelled(self, ranks: ArrayLike, chunks: ArrayLike) -> TransferTable:
        """Rank r becomes ranks[r], and slot c becomes chunks[c]."""
        rank_of = np.asarray(ranks, np.int32)
        chunk_of = np.asarray(chunks, np.int32)
        return replace(
            self,
            src=rank_of[self.src],
            dst=rank_of[self.dst],
            chunk=chunk_of[self.chunk],
            into=chunk_of[self.into],
        )

    def embedded(self, members: ArrayLike, chunks: ArrayLike) -> TransferTable:
        """The same schedule in many groups of ranks at once.

        `members[g, r]` takes the role of rank r in group g; `chunks[g, c, :]` are the chunks that
        take the role of chunk c there.
        """
        rank_of = np.asarray(members, np.int32).T
        chunk_of = np.asarray(chunks, np.int32).swapaxes(0, 1)  # by chunk, group, index
        return rows(
            self.round[:, None, None],
            rank_of[self.src][:, :, None],
            rank_of[self.dst][:, :, None],
            chunk_of[self.chunk],
            self.reduce[:, None, None],
            chunk_of[self.into],
            num_rounds=self.num_rounds,
        )

    def only(self, keep: Bools) -> TransferTable:
        """The rows for which `keep` holds; the rounds stay where they are."""
        return replace(self, **{name: getattr(self, name)[keep] for name in _COLUMNS})


def rows(
    round: ArrayLike,
    src: ArrayLike,
    dst: ArrayLike,
    chunk: ArrayLike,
    reduce: ArrayLike,
    into: ArrayLike | None = None,
    num_rounds: int | None = None,
) -> TransferTable:
    """A table from columns that are broadcast against each other, as numpy does it."""
    columns = np.broadcast_arrays(round, src, dst, chunk, chunk if into is None else into, reduce)
    flat = [np.ascontiguousarray(column).ravel() for column in columns]
    when, src, dst, chunk, into = (c.astype(np.int32, copy=False) for c in flat[:5])
    if num_rounds is None:
        num_rounds = int(when.max()) + 1 if when.size else 0
    flags = flat[5].astype(np.bool_)
    return _merged([TransferTable(num_rounds, when, src, dst, chunk, into, flags)], num_rounds)


def from_rounds(rounds: Iterable[Iterable[Transfer]]) -> TransferTable:
    """A table from rounds as lists of `Transfer`."""
    listed = [list(transfers) for transfers in rounds]
    flat = [(i, t) for i, transfers in enumerate(listed) for t in transfers]
    names = ("src", "dst", "chunk", "reduce")
    src, dst, chunk, reduce = ([getattr(t, name) for _, t in flat] for name in names)
    into = [t.chunk if t.into is None else t.into for _, t in flat]
    return rows([i for i, _ in flat], src, dst, chunk, reduce, into, num_rounds=len(listed))


def _merged(tables: Sequence[TransferTable], num_rounds: int) -> TransferTable:
    columns = [getattr(tables[0], name) for name in _COLUMNS]
    if len(tables) > 1:
        columns = [np.concatenate([getattr(one, name) for one in tables]) for name in _COLUMNS]
    if np.any(columns[0][1:] < columns[0][:-1]):
        order = np.argsort(columns[0], kind="stable")
        columns = [column[order] for column in columns]
    return TransferTable(num_rounds, *columns)


EMPTY = rows([], [], [], [], [])
