"""Which workers of a run have ended: the launcher leaves a note of each in the run directory.

A note is written after the process has ended, so whatever a worker had to say is there by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path


def note_of(run_dir: str | Path, rank: int) -> Path:
    return Path(run_dir) / f"gone-{rank}.json"


def is_gone(run_dir: str | Path, rank: int) -> bool:
    """Whether a worker's process has ended, well or badly."""
    return note_of(run_dir, rank).exists()


def gone_in(environ: Mapping[str, str]) -> Callable[[int], bool] | None:
    """How to ask who is gone; None where no launcher of ours leaves notes."""
    run_dir = environ.get("SHOAL_RUN_DIR")
    return None if not run_dir else lambda rank: is_gone(run_dir, rank)
