"""A sum over the surviving ranks, where others may have been lost.

    rank 0   writes 1.0 ───────────── reads 1.0, 3.0 ──> 4.0, missing (1,)
    rank 1   is killed; the launcher records that it has exited
    rank 2   writes 3.0 ───────────── reads 1.0, 3.0 ──> 4.0, missing (1,)

A rank is waited for until it has either written or exited. What a rank that has exited has written,
or not, is final, so all surviving ranks get the same result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from shoal.comm.members.board import Document, FileBoard
from shoal.errors import PeerLost
from shoal.runtime.waits import until, waiting

PATIENCE_S = 1800.0


class SurvivorSum(NamedTuple):
    """The sum over the ranks that took part, and those that did not."""

    numbers: list[float]
    missing: tuple[int, ...]


@dataclass(eq=False)
class ElasticSum:
    """Adds small vectors over ranks, by lines of a file that all ranks see.

    All ranks call `all_reduce` equally often. `has_exited(rank)` must return True only when that
    rank will write nothing more. `patience_s` bounds the wait for a rank that neither writes nor
    exits.
    """

    file: Path
    rank: int
    has_exited: Callable[[int], bool]
    patience_s: float = PATIENCE_S
    name: str = ""

    def __post_init__(self) -> None:
        self._board = FileBoard(self.file)
        self._board.take = self._take
        self._call = (self.name, "", 0)
        self._rows: defaultdict[tuple[Any, ...], dict[int, list[Any]]] = defaultdict(dict)

    def beside(self, name: str) -> ElasticSum:
        """Another sum over the same ranks, which counts its own calls."""
        return replace(self, name=name)

    def begin(self, meeting: str) -> None:
        """The next calls belong to a meeting of this name: see `comm/members/meetings.py`."""
        self._call = (self.name, meeting, 0)

    def all_reduce(self, numbers: Sequence[float], ranks: Sequence[int]) -> SurvivorSum:
        """The sum over the survivors of `ranks`; the same bits on each of them."""
        rows = self.gather(numbers, ranks)
        return SurvivorSum(
            [sum(map(float, column)) for column in zip(*rows.values(), strict=True)],
            tuple(rank for rank in ranks if rank not in rows),
        )

    def gather(self, row: Sequence[Any], ranks: Sequence[int]) -> dict[int, list[Any]]:
        """The rows of the survivors of `ranks`, by rank; what is in them is JSON."""
        self._rows.pop(self._call, None)
        self._call = (*self._call[:2], self._call[2] + 1)
        self._board.append(lambda: {"sum": self._call, "rank": self.rank, "row": list(row)})
        rows = self._rows[self._call]

        def absent() -> list[str]:
            return [str(rank) for rank in ranks if rank not in rows]

        def is_complete() -> bool | None:
            # exits first: then what was written before is final
            exited = [rank for rank in ranks if rank not in rows and self.has_exited(rank)]
            self._board.look()
            return all(rank in rows or rank in exited for rank in ranks) or None

        def lost() -> PeerLost:
            doing = f"a sum that rank {' and '.join(absent())} never came to"
            return PeerLost(self.rank, int(absent()[0]), doing, self.patience_s)

        doing = "job.save, job.load or job.evaluate, which all ranks call"
        wait = waiting(f"rank {self.rank}", lambda: f"rank {' and '.join(absent())}", doing)
        until(is_complete, wait, self.patience_s, lost)
        return {rank: rows[rank] for rank in ranks if rank in rows}

    def _take(self, document: Document) -> None:
        if "sum" in document and document["sum"][0] == self.name:
            self._rows[tuple(document["sum"])][document["rank"]] = document["row"]
