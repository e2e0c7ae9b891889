"""The last operations of each rank of a shared-memory group, and how they are told."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

KINDS = (
    "barrier",
    "broadcast",
    "reduce",
    "all_reduce",
    "gather",
    "scatter",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "scan",
    "exclusive_scan",
    "all_to_all with uneven pieces",
)
DTYPES = ("8-bit", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
OPS = ("sum", "mean", "prod", "min", "max", "and", "or", "xor")
_REDUCING = ("reduce", "all_reduce", "reduce_scatter", "scan", "exclusive_scan")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")


@dataclass(frozen=True)
class Record:
    """One call of one rank; `end_ns` is 0 while it has not ended."""

    seq: int
    kind: int
    dtype: int
    op: int
    root: int
    count: int
    start_ns: int
    end_ns: int

    def __str__(self) -> str:
        kind = KINDS[self.kind]
        words = [f"{kind} #{self.seq}"]
        if kind != "barrier":
            words.append(f"of {self.count:,} {DTYPES[self.dtype]}")
        if kind in _REDUCING:
            words.append(OPS[self.op])
        if kind in _ROOTED:
            words.append(f"root {self.root}")
        return " ".join(words)


class Histories(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def history(self, rank: int) -> list[Record]: ...


def table(group: Histories, now_ns: int, limit: int) -> str:
    """A few lines for every rank, the newest last."""
    lines = []
    for rank in range(group.size):
        lines.append(f"rank {rank}:")
        for record in group.history(rank)[-limit:]:
            began = f"{(now_ns - record.start_ns) / 1e6:.1f} ms ago"
            took = f"took {(record.end_ns - record.start_ns) / 1e3:.0f} µs"
            lines.append(f"  {record}, begun {began}, {took if record.end_ns else 'not ended'}")
    return "\n".join(lines)


def dump(group: Histories, reason: str) -> None:
    """Write the operations before a failure beside the run's reports, or in short to stderr."""
    folder = os.environ.get("SHOAL_RUN_DIR")
    now_ns = time.monotonic_ns()
    if folder and Path(folder).is_dir():
        whole = f"{reason}\n{table(group, now_ns, 64)}\n"
        (Path(folder) / f"operations-{group.rank}.txt").write_text(whole)
    else:
        print(f"shoal: {reason}\n{table(group, now_ns, 3)}", file=sys.stderr, flush=True)
