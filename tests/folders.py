"""Folders for sockets of tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.runtime.files import remove_locked
from shoal.runtime.run_dir import new_server_dir


@contextmanager
def socket_folder() -> Iterator[Path]:
    """With a short path; what tests that are killed leave is removed by the next ones."""
    made = new_server_dir()
    try:
        yield made.path
    finally:
        remove_locked(made.path)
