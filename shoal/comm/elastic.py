"""A sum over the ranks that are left, where others may have been lost.

    rank 0   writes 1.0 ───────────── reads 1.0, 3.0 ──> 4.0, missing (1,)
    rank 1   is killed; the launcher notes that it is gone
    rank 2   writes 3.0 ───────────── reads 1.0, 3.0 ──> 4.0, missing (1,)

A rank is waited for until it has either written or is gone. What a rank that is gone has written,
or not, does not change any more, so all that are left find the same.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.errors import Desync, PeerLost
from shoal.runtime.backoff import Pauses

FIRST_LOOK_S = 0.001
LONGEST_LOOK_S = 0.05
PATIENCE_S = 1800.0
_MAX_BYTES = 1 << 20


class Sum(NamedTuple):
    """The sum over the ranks that took part, and those that did not."""

    numbers: list[float]
    missing: tuple[int, ...]


class Tally:
    """Adds up small vectors over ranks through files in a folder that all of them see.

    All ranks call `add_up` equally often. `is_gone(rank)` must say yes only when that rank will
    write nothing more. `patience_s` bounds the wait for a rank that neither writes nor is gone.
    Costs one small file a rank and call, and up to 50 ms of waiting after the last one has come.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        is_gone: Callable[[int], bool],
        patience_s: float = PATIENCE_S,
    ):
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self._rank = rank
        self._is_gone = is_gone
        self._patience_s = patience_s
        self._round = 0

    def add_up(self, numbers: Sequence[float], ranks: Sequence[int]) -> Sum:
        """The sum over those of `ranks` that are there; the same on each of them, to the bit."""
        self._round += 1
        self._write(numbers)
        rows = {rank: self._wait_for(rank, ranks, len(numbers)) for rank in ranks}
        there = [row for row in rows.values() if row is not None]
        # whoever has written in this round has read the last one
        self._path(self._round - 1, self._rank).unlink(missing_ok=True)
        return Sum(
            [sum(column) for column in zip(*there, strict=True)],
            tuple(rank for rank, row in rows.items() if row is None),
        )

    def _write(self, numbers: Sequence[float]) -> None:
        path = self._path(self._round, self._rank)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(list(numbers)), encoding="ascii")
        os.replace(part, path)

    def _wait_for(self, rank: int, ranks: Sequence[int], length: int) -> list[float] | None:
        start_s = time.monotonic()
        pause = Pauses(FIRST_LOOK_S, LONGEST_LOOK_S)
        while True:
            gone = self._is_gone(rank)  # asked first: what it left is final if it is gone now
            row = self._read(rank, length)
            if row is not None or gone:
                return row
            if time.monotonic() - start_s > self._patience_s:
                raise self._lost(ranks)
            pause()

    def _read(self, rank: int, length: int) -> list[float] | None:
        path = self._path(self._round, rank)
        try:
            with path.open("rb") as file:
                found = json.loads(file.read(_MAX_BYTES))
        except FileNotFoundError:
            return None
        if not isinstance(found, list) or len(found) != length:
            theirs = len(found) if isinstance(found, list) else 0
            raise Desync(
                self._rank, f"a tally of {length} numbers", rank, f"one of {theirs} numbers"
            )
        return [float(number) for number in found]

    def _lost(self, ranks: Sequence[int]) -> PeerLost:
        absent = [
            rank
            for rank in ranks
            if not self._is_gone(rank) and not self._path(self._round, rank).exists()
        ]
        names = " and ".join(map(str, absent))
        doing = f"a tally that {'rank' if len(absent) == 1 else 'ranks'} {names} never came to"
        return PeerLost(self._rank, absent[0] if absent else None, doing, self._patience_s)

    def _path(self, round_number: int, rank: int) -> Path:
        return self._folder / f"{round_number}-{rank}.json"
