"""Ranks that are threads, on one core: they hold the interpreter's lock in turn anyway.

On two cores every operation of torch hands the lock from one core to the other, which costs a
third of the time and most of the system calls. With --whole they run where they like.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tests.products import WHOLE_SUITE


@contextmanager
def one_core() -> Iterator[None]:
    """Threads that are started in the block, and theirs, share a core; if none is free, all."""
    if os.environ.get(WHOLE_SUITE) or not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    with socket.socket(socket.AF_UNIX) as reservation:
        os.sched_setaffinity(0, _reserve(allowed, reservation))  # this thread; others inherit it
        try:
            yield
        finally:
            os.sched_setaffinity(0, allowed)


def _reserve(cores: set[int], reservation: socket.socket) -> set[int]:
    """A core that no other process of the tests uses now: an abstract name has one owner."""
    for core in sorted(cores):
        try:
            reservation.bind(f"\0shoal-tests-core-{core}")
        except OSError:
            continue
        return {core}
    return cores
