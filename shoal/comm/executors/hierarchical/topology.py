"""Which ranks of a group share a host."""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shoal.errors import PeerLost


def host_id(override: str | None = None) -> bytes:
    """Equal on ranks that share memory and loopback: one kernel, user and set of namespaces.

    `override` (SHOAL_HOST_ID) stands for all of these: for tests, and for containers that share
    a kernel but no memory.
    """
    words = [override] if override else [socket.gethostname(), str(os.getuid()), *_kernel()]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:32].encode()


def _kernel() -> list[str]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, *(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("pid", "net"))]
    except OSError:  # not Linux: only its name is known
        return []


@dataclass(frozen=True)
class Topology:
    """The ranks of each host, and which of all ranks this one is.

    hosts ((0, 1), (2, 3)), rank 2:  host 1, index 0

    `racks` has the rack of each host, by number; empty where it is not known.
    """

    hosts: tuple[tuple[int, ...], ...]
    rank: int
    racks: tuple[int, ...] = ()

    @classmethod
    def of(cls, ids: Sequence[bytes], rank: int) -> Topology:
        """`ids` has the host of every rank; hosts are in the order of their first ranks."""
        ranks_of: dict[bytes, list[int]] = {}
        for peer, name in enumerate(ids):
            ranks_of.setdefault(name, []).append(peer)
        return cls(tuple(tuple(ranks) for ranks in ranks_of.values()), rank)

    @cached_property
    def host(self) -> int:
        return self.host_of(self.rank)

    @cached_property
    def index(self) -> int:
        """Which of its host's ranks this one is."""
        return self.local.index(self.rank)

    @property
    def column(self) -> list[int] | None:
        """The ranks of this index on all hosts; if hosts differ in size, the first ones only."""
        if self.index and not self.is_even:
            return None
        return [ranks[self.index] for ranks in self.hosts]

    @property
    def local(self) -> tuple[int, ...]:
        return self.hosts[self.host]

    @cached_property
    def size(self) -> int:
        return sum(len(ranks) for ranks in self.hosts)

    @cached_property
    def is_even(self) -> bool:
        """All hosts have equally many ranks."""
        return len({len(ranks) for ranks in self.hosts}) == 1

    @cached_property
    def hosts_per_rack(self) -> int | None:
        """Where there are several racks, with equally many hosts each, one rack after the other."""
        counts = [len(list(group)) for _, group in itertools.groupby(self.racks)]
        is_even = len(set(counts)) == 1 and len(counts) == len(set(self.racks)) > 1
        return counts[0] if is_even and counts[0] > 1 else None

    def host_of(self, rank: int) -> int:
        return next(host for host, ranks in enumerate(self.hosts) if rank in ranks)

    def of_subset(self, ranks: Sequence[int]) -> Topology:
        """The topology of some ranks, numbered in their order; this rank is among them."""
        numbers = {rank: number for number, rank in enumerate(ranks)}
        hosts = [[numbers[rank] for rank in ranks if rank in host] for host in self.hosts]
        racks = [rack for rack, host in zip(self.racks, hosts, strict=False) if host]
        kept = tuple(tuple(host) for host in hosts if host)
        return Topology(kept, numbers[self.rank], tuple(racks))


class RemotePeerLost(PeerLost):
    """A PeerLost that names ranks of the whole group already."""
