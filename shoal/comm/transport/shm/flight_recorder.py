"""Flight recorder: the last 64 operations of each rank of a shared-memory group."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.runtime.run_dir import RunDir

if TYPE_CHECKING:
    from shoal.comm.transport.shm.segment import Segment

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
class RecordedCall:
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


def table(segment: Segment, now_ns: int, limit: int) -> str:
    """The last `limit` calls of every rank, the newest last."""
    lines = []
    for rank in range(segment.size):
        lines.append(f"rank {rank}:")
        for call in segment.history(rank)[-limit:]:
            began = f"{(now_ns - call.start_ns) / 1e6:.1f} ms ago"
            took = f"took {(call.end_ns - call.start_ns) / 1e3:.0f} µs"
            lines.append(f"  {call}, begun {began}, {took if call.end_ns else 'not ended'}")
    return "\n".join(lines)


def dump(segment: Segment, reason: str, run_dir: RunDir | None) -> None:
    """Write the operations before a failure to the run directory, or in short to stderr."""
    now_ns = time.monotonic_ns()
    if run_dir is not None and run_dir.path.is_dir():
        text = f"{reason}\n{table(segment, now_ns, 64)}\n"
        run_dir.operations(segment.rank).write_text(text)
    else:
        print(f"shoal: {reason}\n{table(segment, now_ns, 3)}", file=sys.stderr, flush=True)
