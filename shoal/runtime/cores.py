"""How many cores there are for this process and its children."""

from __future__ import annotations

import os


def cores() -> int:
    """The cores that this process may use; the machine may have more."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of(servers: int) -> dict[str, str]:
    """Variables of a server process, which has all cores while workers wait for an update.

    Its idle threads sleep, so that they do not take cores from the workers.
    """
    return {"OMP_NUM_THREADS": str(max(1, cores() // servers)), "OMP_WAIT_POLICY": "passive"}
