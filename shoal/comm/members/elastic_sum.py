"""A sum over the surviving ranks, where others may have been lost.

    rank 0   writes 1.0 ───────────── reads 1.0, 3.0 ──> 4.0, missing (1,)
    rank 1   is killed; the launcher records that it has exited
    rank 2   writes 3.0 ───────────── reads 1.0, 3.0 ──> 4.0, missing (1,)

A rank is waited for until it has either written or exited. What a rank that has exited has written,
or not, is final, so all surviving ranks get the same result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import Desync, PeerLost
from shoal.runtime.files import write_atomically
from shoal.runtime.waits import Backoff, waiting

FIRST_LOOK_S = 0.001
LONGEST_LOOK_S = 0.05
PATIENCE_S = 1800.0
_MAX_BYTES = 1 << 20


class SurvivorSum(NamedTuple):
    """The sum over the ranks that took part, and those that did not."""

    numbers: list[float]
    missing: tuple[int, ...]


class ElasticSum:
    """Adds small vectors over ranks, through files in a folder that all ranks see.

    All ranks call `all_reduce` equally often. `has_exited(rank)` must return True only when that
    rank will write nothing more. `patience_s` bounds the wait for a rank that neither writes nor
    exits. Costs one small file per rank and call, and up to 50 ms after the last rank has written.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        has_exited: Callable[[int], bool],
        patience_s: float = PATIENCE_S,
    ):
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self._rank = rank
        self._has_exited = has_exited
        self._patience_s = patience_s
        self._meeting = ""
        self._round = 0
        self._written: Path | None = None

    def beside(self, name: str) -> ElasticSum:
        """Another sum over the same ranks, which counts its own calls."""
        folder = self._folder.with_name(f"{self._folder.name}-{name}")
        return ElasticSum(folder, self._rank, self._has_exited, self._patience_s)

    def begin(self, meeting: str) -> None:
        """The next calls belong to a meeting of this name: see `comm/members/meetings.py`."""
        self._meeting = f"{meeting}-"
        self._round = 0

    def all_reduce(self, numbers: Sequence[float], ranks: Sequence[int]) -> SurvivorSum:
        """The sum over the survivors of `ranks`; the same bits on each of them."""
        rows = self.gather(numbers, ranks)
        return SurvivorSum(
            [sum(map(float, column)) for column in zip(*rows.values(), strict=True)],
            tuple(rank for rank in ranks if rank not in rows),
        )

    def gather(self, row: Sequence[Any], ranks: Sequence[int]) -> dict[int, list[Any]]:
        """The rows of the survivors of `ranks`, as long as this one; what is in them is JSON."""
        self._round += 1
        before = self._written
        self._written = self._path(self._round, self._rank)
        write_atomically(self._written, json.dumps(list(row)))
        rows = {rank: self._wait_for(rank, ranks, len(row)) for rank in ranks}
        # a rank that has written in this round has read the last one
        if before is not None:
            before.unlink(missing_ok=True)
        return {rank: found for rank, found in rows.items() if found is not None}

    def _wait_for(self, rank: int, ranks: Sequence[int], length: int) -> list[Any] | None:
        with waiting(f"rank {self._rank}", f"rank {rank}", "a sum over the surviving workers"):
            return self._poll(rank, ranks, length)

    def _poll(self, rank: int, ranks: Sequence[int], length: int) -> list[Any] | None:
        start_s = time.monotonic()
        pause = Backoff(FIRST_LOOK_S, LONGEST_LOOK_S)
        while True:
            exited = self._has_exited(rank)  # before reading: then what it has written is final
            row = self._read(rank, length)
            if row is not None or exited:
                return row
            if time.monotonic() - start_s > self._patience_s:
                raise self._lost(ranks)
            pause()

    def _read(self, rank: int, length: int) -> list[Any] | None:
        path = self._path(self._round, rank)
        try:
            with path.open("rb") as file:
                row = json.loads(file.read(_MAX_BYTES))
        except FileNotFoundError:
            return None
        if not isinstance(row, list) or len(row) != length:
            their_length = len(row) if isinstance(row, list) else 0
            raise Desync(
                self._rank, f"a sum of {length} numbers", rank, f"one of {their_length} numbers"
            )
        return row

    def _lost(self, ranks: Sequence[int]) -> PeerLost:
        absent = [
            rank
            for rank in ranks
            if not self._has_exited(rank) and not self._path(self._round, rank).exists()
        ]
        names = " and ".join(map(str, absent))
        doing = f"a sum that {'rank' if len(absent) == 1 else 'ranks'} {names} never came to"
        return PeerLost(self._rank, absent[0] if absent else None, doing, self._patience_s)

    def _path(self, round_number: int, rank: int) -> Path:
        return self._folder / f"{self._meeting}{round_number}-{rank}.json"
