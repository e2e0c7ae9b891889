"""Memory of a run that a process finds at any time, as long as one that maps it is alive.

    folder/lock     held while a process looks for the memory, or makes it
    folder/2        where rank 2 keeps it open: process, descriptor, generation

The first process makes it and fills it; each later one opens it at any other that is alive. So a
worker that was lost finds it again when it comes back. There is no rendezvous of all ranks.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.errors import BadInput
from shoal.runtime.run_dir import write_atomically
from shoal.transport.shm import memfd
from shoal.transport.shm.memfd import Offer

_MAX_OFFER_BYTES = 128


class MemoryGone(Exception):
    """Every process that kept the memory has ended."""


class LastingMemory:
    """One process's view: `memory` is mapped, and its descriptor stays open for others."""

    def __init__(self, memory: mmap.mmap, descriptor: int):
        self.memory = memory
        self._descriptor = descriptor

    @classmethod
    def join(
        cls, folder: Path, rank: int, num_bytes: int, fill: Callable[[mmap.mmap], None]
    ) -> LastingMemory:
        """Find the memory, or make it: `fill` is called with it before another process sees it."""
        folder.mkdir(mode=0o700, exist_ok=True)
        with _locked(folder):
            offers = [_read(path) for path in folder.glob("[0-9]*")]
            found = [_open(offer, num_bytes) for offer in offers if offer is not None]
            usable = [descriptor for descriptor in found if descriptor is not None]
            for unneeded in usable[1:]:
                os.close(unneeded)
            if offers and not usable:
                raise MemoryGone
            descriptor = usable[0] if usable else _make(num_bytes)
            generation = int.from_bytes(os.pread(descriptor, 8, 0), sys.byteorder)
            memory = memfd.map_all(descriptor, num_bytes)
            if not usable:
                fill(memory)
            offer = Offer(os.getpid(), descriptor, generation)
            write_atomically(folder / str(rank), bytes(offer))
        return cls(memory, descriptor)

    def close(self) -> None:
        """It is not found here any more. It stays mapped while an array or tensor shows it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _make(num_bytes: int) -> int:
    descriptor = memfd.make("shoal-lasting", num_bytes, memfd.new_generation())
    if descriptor < 0:
        raise BadInput(
            f"there are no {num_bytes / 1e9:.3g} GB of shared memory for the weights: run the "
            "workers on a Linux host with more memory"
        )
    return descriptor


def _open(offer: Offer, num_bytes: int) -> int | None:
    with suppress(OSError, ValueError):
        return offer.open_checked(num_bytes)
    return None


def _read(path: Path) -> Offer | None:
    with suppress(OSError, ValueError), path.open("rb") as file:
        return Offer.parse(file.read(_MAX_OFFER_BYTES))
    return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # and with it the lock
