"""How much memory is left: of the machine, and of the container (cgroup) of this process.

Memory above a container's limit does not fail: the kernel kills a process of the container. So it
is asked for before, and the kernel's count of such kills tells afterwards who it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_CGROUPS = "sys/fs/cgroup"
# files of version 2 and of version 1: limit, use, count of kills; and the cache in memory.stat
_NAMES = [
    ("memory.max", "memory.current", "memory.events", ("active_file", "inactive_file")),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "memory.oom_control",
        ("total_active_file", "total_inactive_file"),
    ),
]


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
            kills = _fields(folder / names[2]).get("oom_kill")
            if kills is not None:
                return kills
        return _fields(self._root / "proc/vmstat").get("oom_kill", 0)


def _left_in_cgroups(root: Path) -> Iterator[int]:
    for folder, (limit_name, use_name, _, cache_names) in _cgroups(root):
        with suppress(OSError, ValueError):  # "max" is no limit
            limit = int((folder / limit_name).read_text())
            use = int((folder / use_name).read_text())
            statistics = _fields(folder / "memory.stat")
            cache = sum(statistics.get(name, 0) for name in cache_names)
            yield max(0, limit - use + cache)


def _cgroups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str, tuple[str, ...]]]]:
    """Folders of this process's memory cgroup and those above it, with the names of files."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds not in ("", "memory"):
                continue
            top = root / _CGROUPS / kinds
            inner = [top / path.strip("/"), *(top / path.strip("/")).parents]
            names = _NAMES[bool(kinds)]
            yield from ((folder, names) for folder in inner if folder.is_relative_to(top))


def _fields(path: Path) -> dict[str, int]:
    """Of a file with lines such as `oom_kill 3`."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, *values = line.split()
            if values and values[0].isdigit():
                found[name] = int(values[0])
    return found
