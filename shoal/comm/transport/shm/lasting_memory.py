"""Memory of a run that a process finds at any time, as long as one that maps it is alive.

    folder/lock     held while a process looks for the memory, or makes it
    folder/2        where rank 2 keeps it open: process, descriptor, generation
    folder/kept     where the launcher does (`keep`)

The first process makes it and fills it; each later one opens it at any other that is alive. So a
worker that was lost finds it again when it comes back. There is no rendezvous of all ranks.

Where a launcher keeps it, no worker uses it before that: memory that is gone without having been
kept was of no use to any worker, and is made again.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shoal.comm.transport.shm import memfd
from shoal.comm.transport.shm.memfd import Offer
from shoal.errors import BadInput
from shoal.runtime.files import locked, write_atomically
from shoal.runtime.waits import waiting

_MAX_OFFER_BYTES = 128
_KEPT = "kept"
_KEEP_S = 5.0  # how long to wait for the launcher
_POLL_S = 0.005


class MemoryGone(Exception):
    """Every process that kept the memory has ended."""


class LastingMemory:
    """One process's view: `memory` is mapped, and its descriptor stays open for others."""

    def __init__(self, memory: mmap.mmap, descriptor: int, is_left: bool = False):
        self.memory = memory
        self.is_left = is_left  # no worker had it open any more, only the launcher
        self._descriptor = descriptor

    @classmethod
    def join(
        cls,
        folder: Path,
        rank: int,
        num_bytes: int,
        fill: Callable[[mmap.mmap], None],
        is_kept: bool = False,
    ) -> LastingMemory:
        """Find the memory, or make it: `fill` is called with it before another process sees it.

        `is_kept`: a launcher keeps it.
        """
        folder.mkdir(mode=0o700, exist_ok=True)
        with locked(folder / "lock"):
            found = _found(folder, num_bytes)
            was_used = not is_kept or (folder / _KEPT).exists()
            if found is None and was_used and _offers(folder):
                raise MemoryGone
            is_left = found is not None and found[0].name == _KEPT
            descriptor = _make(num_bytes) if found is None else found[1]
            memory = memfd.map_all(descriptor, num_bytes)
            if found is None:
                fill(memory)
            _write_offer(folder / str(rank), descriptor)
        if is_kept:
            _await_keeper(folder, rank)
        return cls(memory, descriptor, is_left)

    def close(self) -> None:
        """It is not found here any more. It stays mapped while an array or tensor shows it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def keep(folder: Path) -> int | None:
    """In the launcher: a descriptor of this memory, if there is any that it does not keep yet."""
    if (folder / _KEPT).exists():
        return None
    with suppress(OSError), locked(folder / "lock", flags=fcntl.LOCK_NB):
        if (found := _found(folder)) is not None:
            _write_offer(folder / _KEPT, found[1])
            return found[1]
    return None


def _found(folder: Path, num_bytes: int | None = None) -> tuple[Path, int] | None:
    """The first offer that is alive, and a descriptor of its memory; the launcher's comes last."""
    for path in _offers(folder):
        with suppress(OSError, ValueError):
            return path, Offer.parse(path.read_bytes()[:_MAX_OFFER_BYTES]).open_checked(num_bytes)
    return None


def _write_offer(path: Path, descriptor: int) -> None:
    """Closes the descriptor where it cannot be offered."""
    generation = int.from_bytes(os.pread(descriptor, 8, 0), sys.byteorder)
    try:
        write_atomically(path, bytes(Offer(os.getpid(), descriptor, generation)))
    except OSError:
        os.close(descriptor)
        raise


def _await_keeper(folder: Path, rank: int) -> None:
    """A launcher that does not come in time will not: it is left out."""
    deadline_s = time.monotonic() + _KEEP_S
    with waiting(f"worker {rank}", "the launcher", "keeping the memory of the weights"):
        while not (folder / _KEPT).exists():
            if time.monotonic() > deadline_s:
                (folder / _KEPT).touch()
            time.sleep(_POLL_S)


def _offers(folder: Path) -> list[Path]:
    """Of workers, then of the launcher."""
    kept = folder / _KEPT
    return [*folder.glob("[0-9]*"), *([kept] if kept.exists() else [])]


def _make(num_bytes: int) -> int:
    descriptor = memfd.make("shoal-lasting", num_bytes, memfd.new_generation())
    if descriptor < 0:
        raise BadInput(
            f"there are no {num_bytes / 1e9:.3g} GB of shared memory for the weights: run the "
            "workers on a Linux host with more memory"
        )
    return descriptor
