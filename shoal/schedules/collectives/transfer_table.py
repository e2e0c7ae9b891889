"""The transfers of a schedule as columns of numbers, so that 1,024 ranks are cheap.

A ring over 1,024 ranks has two million transfers. As Python objects they would take seconds to
make and gigabytes to hold; as columns they take milliseconds. A `TransferTable` still reads like a
tuple of rounds: `table[3]` is the fourth round, a tuple of `Transfer`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]


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

    @overload
    def __getitem__(self, index: int) -> tuple[Transfer, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[Transfer, ...], ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"round {index} of {len(self)}")
        first, last = np.searchsorted(self.round, [index % len(self), index % len(self) + 1])
        return tuple(self._transfers(int(first), int(last)))

    def __iter__(self) -> Iterator[tuple[Transfer, ...]]:
        bounds = np.searchsorted(self.round, np.arange(len(self) + 1)).tolist()
        for first, last in itertools.pairwise(bounds):
            yield tuple(self._transfers(first, last))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(tuple(r) for r in other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def _transfers(self, first: int, last: int) -> Iterator[Transfer]:
        selected = slice(first, last)
        columns = (self.src, self.dst, self.chunk, self.reduce, self.into)
        for src, dst, chunk, reduce, into in zip(
            *(c[selected].tolist() for c in columns), strict=True
        ):
            yield Transfer(src, dst, chunk, reduce, None if into == chunk else into)

    @property
    def num_transfers(self) -> int:
        return int(self.round.size)

    def then(self, *later: TransferTable) -> TransferTable:
        """This table, and after its last round the rounds of the others."""
        tables = []
        start = 0
        for table in (self, *later):
            tables.append(table.delayed(start))
            start += table.num_rounds
        return _merged(tables, start)

    def beside(self, *others: TransferTable) -> TransferTable:
        """All tables at the same time: their rounds with the same number become one."""
        tables = (self, *others)
        return _merged(tables, max(table.num_rounds for table in tables))

    def delayed(self, num_rounds: int) -> TransferTable:
        return self._with(self.num_rounds + num_rounds, round=self.round + np.int32(num_rounds))

    def reversed(self, reduce: bool) -> TransferTable:
        """Last round first, every transfer reversed: broadcast to reduce."""
        flags = np.full_like(self.reduce, reduce)
        last = np.int32(self.num_rounds - 1)
        turned = self._with(
            self.num_rounds,
            round=last - self.round,
            src=self.dst,
            dst=self.src,
            chunk=self.into,
            into=self.chunk,
            reduce=flags,
        )
        return _merged([turned], self.num_rounds)

    def relabelled(self, ranks: ArrayLike, chunks: ArrayLike) -> TransferTable:
        """Rank r becomes ranks[r], and slot c becomes chunks[c]."""
        rank_of = np.asarray(ranks, np.int32)
        chunk_of = np.asarray(chunks, np.int32)
        return self._with(
            self.num_rounds,
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
        chunk_of = np.asarray(chunks, np.int32)
        chunk_of = chunk_of.swapaxes(0, 1)  # by chunk, group, index
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
        names = ("round", "src", "dst", "chunk", "into", "reduce")
        return self._with(self.num_rounds, **{name: getattr(self, name)[keep] for name in names})

    def _with(self, num_rounds: int, **columns: Any) -> TransferTable:
        names = ("round", "src", "dst", "chunk", "into", "reduce")
        return TransferTable(num_rounds, **{n: columns.get(n, getattr(self, n)) for n in names})


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
    ints = [column.astype(np.int32, copy=False) for column in flat[:5]]
    if num_rounds is None:
        num_rounds = int(ints[0].max()) + 1 if ints[0].size else 0
    table = TransferTable(
        num_rounds, ints[0], ints[1], ints[2], ints[3], ints[4], flat[5].astype(np.bool_)
    )
    return _merged([table], num_rounds)


def from_rounds(rounds: Iterable[Iterable[Transfer]]) -> TransferTable:
    """A table from rounds as lists of `Transfer`."""
    listed = [list(transfers) for transfers in rounds]
    flat = [(i, t) for i, transfers in enumerate(listed) for t in transfers]
    return rows(
        [i for i, _ in flat],
        [t.src for _, t in flat],
        [t.dst for _, t in flat],
        [t.chunk for _, t in flat],
        [t.reduce for _, t in flat],
        [t.chunk if t.into is None else t.into for _, t in flat],
        num_rounds=len(listed),
    )


def _merged(tables: Sequence[TransferTable], num_rounds: int) -> TransferTable:
    names = ("round", "src", "dst", "chunk", "into", "reduce")
    columns = [
        getattr(tables[0], name)
        if len(tables) == 1
        else np.concatenate([getattr(table, name) for table in tables])
        for name in names
    ]
    if np.any(columns[0][1:] < columns[0][:-1]):
        order = np.argsort(columns[0], kind="stable")
        columns = [column[order] for column in columns]
    return TransferTable(num_rounds, *columns)


EMPTY = rows([], [], [], [], [])
