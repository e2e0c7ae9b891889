"""Folders for the files of a command, which are removed even where the command was killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.runtime.locked_folders import make_locked, remove_abandoned, remove_locked


@contextmanager
def scratch_folder(kind: str, parent: str | None = None) -> Iterator[Path]:
    """Removed at the end of the block; if this process is killed, by the next that makes one."""
    remove_abandoned()
    path = make_locked(kind, parent)
    try:
        yield path
    finally:
        remove_locked(path)
