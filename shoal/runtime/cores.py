"""How many cores there are for this process and its children."""

from __future__ import annotations

import os

_THREAD_BYTES = 8 << 20  # of weights, for each thread of a server
_SPINS = 1000  # of an idle thread of a server, some ten microseconds


def cores() -> int:
    """The cores that this process may use; the machine may have more."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of(servers: int) -> dict[str, str]:
    """Variables of a server process: the most threads that it may use, see `server_threads`.

    Its idle threads sleep, so that they do not take cores from the workers; between two kernels of
    one update they look for work a moment longer, since a sleeping thread wakes up slowly.
    """
    return {
        "OMP_NUM_THREADS": str(most_server_threads(cores(), servers)),
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": str(_SPINS),
    }


def most_server_threads(cores: int, servers: int) -> int:
    """Servers of a host share its cores, which they have while workers wait for an update."""
    return max(1, cores // servers)


def server_threads(num_bytes: float, most: int) -> int:
    """Threads of a server that holds so many bytes of weights.

    Its kernels are bound by memory: to wake up a thread takes as long as to add up some hundred
    kilobytes, so that a slice in the caches of one core is left to that core.
    """
    return max(1, min(most, int(num_bytes // _THREAD_BYTES)))
