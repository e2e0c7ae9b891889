"""The progress bar of a run in a terminal, and under it a table of its workers.

step 120/500 ━━━━━━━━━━━━━━━━━━━━━ loss 0.31  4,210 samples/s  0:09 left
worker step behind samples/s waiting state
0       120             1052      3% training
1       118      2      1049     21% back
2        40     80                   lost
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from rich.console import RenderableType

from shoal.runtime.decoders import convert
from shoal.runtime.tables import plain_table
from shoal.train.progress import ProgressBar

_OTHER_LINES = 5  # the bar, the headings, the sum of the rest, and room for a line of a worker
_ENDED = ("lost", "finished", "stopped", "not started")
_STEADY = ("training", "finished", "stopped", "not started")


class WorkerRow(msgspec.Struct):
    """What is known of a worker; its own records change all, those of the launcher the state."""

    rank: int
    state: str = "starting"
    step: int = 0
    steps_per_s: float = 0.0
    samples_per_s: float = 0.0
    waiting: float | None = None
    was_lost: bool = False

    def take(self, new: WorkerRow, is_own: bool) -> None:
        if is_own:
            if self.state in _ENDED:  # sent before its end
                return
            self.step = new.step
            self.waiting = new.waiting
            self.steps_per_s = new.steps_per_s
            self.samples_per_s = new.samples_per_s
        self.was_lost |= new.state == "lost"
        self.state = new.state
        if new.state == "training" and self.was_lost:
            self.state = "back"
        if self.state in (*_ENDED, "starting"):
            self.steps_per_s = self.samples_per_s = 0.0
            self.waiting = None


class WorkersView(ProgressBar):
    """A bar and a table; `started`: so many of the workers are there at first."""

    _is_shown = False

    def __init__(self, workers: int, started: int | None = None):
        super().__init__()
        self._rows = [
            WorkerRow(rank, "starting" if rank < (started or workers) else "not started")
            for rank in range(workers)
        ]

    def show(self, record: Mapping[str, Any]) -> None:
        if "rank" not in record:
            super().show(record)
            return
        try:
            new = convert(record, WorkerRow)
        except msgspec.ValidationError:  # nothing that a worker sends
            return
        if 0 <= new.rank < len(self._rows):
            is_own = "step" in record
            self._rows[new.rank].take(new, is_own)
            if is_own and len(self._rows) > 1:
                self._is_shown = True
                self._rich.start()

    def below(self) -> Iterator[RenderableType]:
        if self._is_shown:
            yield from workers_table(self._rows, self._rich.console.height - _OTHER_LINES)

    def close(self) -> None:
        """The bar stays, the table does not."""
        self._is_shown = False
        super().close()


def workers_table(rows: Sequence[WorkerRow], most: int) -> list[RenderableType]:
    """At most so many rows: those that are not as usual, then the furthest behind."""
    first = max(row.step for row in rows)
    most = max(most, 1)
    by_interest = sorted(rows, key=lambda row: (row.state in _STEADY, row.step, row.rank))
    shown = sorted(by_interest[:most], key=lambda row: row.rank)
    left = by_interest[most:]
    by_samples = any(row.samples_per_s for row in rows)
    heads = ["worker", "step", "behind", "samples/s" if by_samples else "steps/s", "waiting"]
    heads.append("state")
    cells = [
        [
            str(row.rank),
            f"{row.step:,}",
            f"{first - row.step:,}" if first > row.step else "",
            _speed(row.samples_per_s if by_samples else row.steps_per_s),
            "" if row.waiting is None else f"{row.waiting:.0%}",
            row.state,
        ]
        for row in shown
    ]
    table = plain_table("", heads, cells)
    table.columns[-1].justify = "left"
    if not left:
        return [table]
    steps = [row.step for row in left]
    return [table, f"… and {len(left)} more, steps {min(steps):,} to {max(steps):,}"]


def _speed(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number else ""
