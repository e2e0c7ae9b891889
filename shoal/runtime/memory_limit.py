"""How much memory is left, of the machine and of the container (cgroup) of this process; cores.

Memory above a container's limit does not fail: the kernel kills a process of the container. So it
is asked for before, and the kernel's count of such kills tells afterwards who it was.

Memory that a step frees is kept for the next one. The C library gives a large block back to the
kernel as soon as it is freed, so every gradient and activation of a step would begin with page
faults: a third of the time of a step where eight workers share a host. People preload jemalloc or
tcmalloc against that; glibc needs two settings.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/")
_CGROUPS = "sys/fs/cgroup"


class _Names(NamedTuple):
    """Of the files in a cgroup's folder."""

    limit: str
    use: str
    kills: str
    cache: tuple[str, ...]  # fields of memory.stat


_VERSION_2 = _Names(
    "memory.max", "memory.current", "memory.events", ("active_file", "inactive_file")
)
_VERSION_1 = _Names(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.oom_control",
    ("total_active_file", "total_inactive_file"),
)


@dataclass(frozen=True)
class MemoryLeft:
    """`num_bytes` more can be taken, and what says so."""

    num_bytes: int
    limited_by: str  # "this container", "this machine"

    def refusal(self, num_bytes: int, use: str) -> str | None:
        """One sentence where so many bytes are too many."""
        if num_bytes <= self.num_bytes:
            return None
        return (
            f"{num_bytes / 1e9:.3g} GB of shared memory ({use}) do not fit: {self.limited_by} has "
            f"{self.num_bytes / 1e9:.3g} GB left"
        )


def memory_left(root: Path = _ROOT) -> MemoryLeft | None:
    """The least that one of the limits leaves; None where the system says nothing."""
    found = [MemoryLeft(left, "this container") for left in _left_in_cgroups(root)]
    machine = _fields(root / "proc/meminfo")
    if "MemAvailable:" in machine:
        kilobytes = machine["MemAvailable:"] + machine.get("SwapFree:", 0)
        found.append(MemoryLeft(kilobytes * 1024, "this machine"))
    return min(found, key=lambda left: left.num_bytes, default=None)


class OutOfMemoryKills:
    """Whether the kernel has killed a process for its memory since this was made."""

    def __init__(self, root: Path = _ROOT):
        self._root = root
        self._before = self._count()

    def has_struck(self) -> bool:
        return self._count() > self._before

    def _count(self) -> int:
        """In this container; of the whole machine where it has no count of its own."""
        for folder, names in _cgroups(self._root):
            kills = _fields(folder / names.kills).get("oom_kill")
            if kills is not None:
                return kills
        return _fields(self._root / "proc/vmstat").get("oom_kill", 0)


def _left_in_cgroups(root: Path) -> Iterator[int]:
    for folder, names in _cgroups(root):
        with suppress(OSError, ValueError):  # "max" is no limit
            limit = int((folder / names.limit).read_text())
            use = int((folder / names.use).read_text())
            statistics = _fields(folder / "memory.stat")
            yield max(0, limit - use + sum(statistics.get(name, 0) for name in names.cache))


def _cgroups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """Folders of this process's memory cgroup and those above it.

    A container of version 1 may see its own folder as the top, and its path as on the host.
    """
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            top = root / _CGROUPS / ("memory" if kinds else "")
            if kinds and "memory" not in kinds.split(","):
                continue
            inner = [top / path.strip("/"), *(top / path.strip("/")).parents]
            for folder in inner:
                if folder.is_relative_to(top):
                    yield folder, _VERSION_1 if kinds else _VERSION_2


def _fields(path: Path) -> dict[str, int]:
    """Of a file with lines such as `oom_kill 3`."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, *values = line.split()
            if values and values[0].isdigit():
                found[name] = int(values[0])
    return found


_THREAD_BYTES = 8 << 20  # of weights, for each thread of a server
_SPINS = 1000  # of an idle thread of a server, some ten microseconds


def cores() -> int:
    """The cores that this process may use; the machine may have more."""
    return len(os.sched_getaffinity(0))


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


_TRIM_THRESHOLD = -1  # of malloc.h
_MMAP_THRESHOLD = -3
_LARGEST_KEPT = 1 << 30


def keep_freed_memory() -> None:
    """Blocks below 1 GiB come from the heap, which does not shrink. Only glibc knows this."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, -1)
