"""Ranks that are threads, on one core: they hold the interpreter's lock in turn anyway.

On two cores every operation of torch hands the lock from one core to the other, which costs a
third of the time and most of the system calls. With --whole they run where they like.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.products import WHOLE_SUITE


@contextmanager
def one_core() -> Iterator[None]:
    """Threads that are started in the block, and theirs, share a core."""
    if os.environ.get(WHOLE_SUITE) or not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {cores[number % len(cores)]})  # of this thread; others inherit it
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
