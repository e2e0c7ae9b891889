"""How many cores there are for this process and its children."""

from __future__ import annotations

import os


def cores() -> int:
    """Those that it may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of(servers: int) -> dict[str, str]:
    """Variables of a server process: all cores are its own while workers wait for an update.

    Its threads sleep when there is nothing to do, instead of keeping workers from computing.
    """
    return {"OMP_NUM_THREADS": str(max(1, cores() // servers)), "OMP_WAIT_POLICY": "passive"}
