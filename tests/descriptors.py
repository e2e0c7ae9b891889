"""File descriptors of this process."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def memory_descriptors() -> set[str]:
    """Of anonymous memory: other threads of a process open and close files at any time.

    Those of objects in cycles, which earlier tests have left, are closed first.
    """
    gc.collect()
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{number}").startswith("/memfd:"):
                found.add(number)
    return found


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Inside the block this process cannot open a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    taken = []
    try:
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
