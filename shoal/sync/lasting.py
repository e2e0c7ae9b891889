"""Memory of all workers of a host, and workers of it that come back: `shoal run --restart`."""

from __future__ import annotations

import math
import mmap
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from shoal.comm.objects import all_gather_bytes, broadcast_bytes
from shoal.comm.transport.shm.lasting_memory import LastingMemory, MemoryGone
from shoal.comm.transport.shm.rank_memory import RankMemory, header_bytes
from shoal.errors import BadInput, PeerLost, RunOver
from shoal.runtime import clock
from shoal.runtime.files import write_atomically
from shoal.runtime.run_dir import RunDir
from shoal.runtime.waits import until, waiting
from shoal.sync import Comeback, Replica, Sync

_ALIGN = 64


def aligned_bytes(sizes: Iterable[int]) -> int:
    """What tensors of so many bytes take, each from the beginning of a cache line on."""
    return sum(-(-size // _ALIGN) * _ALIGN for size in sizes)


def views_in(memory: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors like these in a tensor of `aligned_bytes`, one after the other."""
    views = []
    start = 0
    for tensor in tensors:
        raw = memory[start : start + tensor.nbytes]
        views.append(raw.view(tensor.dtype).view(tensor.shape))
        start += aligned_bytes([tensor.nbytes])
    return views


def comes_back(replica: Replica) -> bool:
    """Whether the launcher starts lost workers of this run again."""
    return replica.config.takes_back and replica.config.run_dir is not None


class InRankMemory(Sync):
    """A sync whose workers share memory, and are left out of it or come back one by one."""

    synchronous = False
    collects = False
    ranks: RankMemory

    def __init__(self, replica: Replica, num_bytes: int, fill: Callable[[mmap.mmap], None]):
        """`fill` writes the memory before another worker sees it; all workers call it."""
        super().__init__(replica)
        self.rank = replica.group.rank
        self.size = replica.group.size
        self._generations: Sequence[int] | None = None  # of the workers at a meeting
        self._is_apart = comes_back(replica)  # workers come when they come
        self._is_away = self._is_apart and replica.config.incarnation > 0
        self.ranks = self._join(replica, num_bytes, fill)

    def _join(
        self, replica: Replica, num_bytes: int, fill: Callable[[mmap.mmap], None]
    ) -> RankMemory:
        run_dir = replica.config.run_dir
        if self._is_apart and run_dir is not None:
            lasting = _join_lasting(replica, run_dir, header_bytes(self.size) + num_bytes, fill)
            place = (self.rank, self.size, replica.config.incarnation)
            return RankMemory.lasting(lasting, place, run_dir.has_ended)
        exchange = partial(all_gather_bytes, self.group)
        ranks = RankMemory.join(exchange, self.rank, self.size, num_bytes)
        if ranks is None:
            raise BadInput(
                "hogwild and asynchronous gossip keep weights in memory that all workers share, "
                "and these share none: run them as one user on one Linux host with "
                f"{num_bytes / 1e9:.3g} GB free, or take ddp"
            )
        if self.rank == 0:
            fill(ranks.memory)
        self.group.barrier().wait()
        return ranks

    def begin(self) -> None:
        self.ranks.job_steps[self.rank] = self.update.steps

    def _take_place(self) -> Comeback:
        """Go on with the step of the fastest worker."""
        self._is_away = False
        lost_at = int(self.ranks.job_steps[self.rank])
        self.update.steps = int(self.ranks.job_steps.max())
        self.ranks.job_steps[self.rank] = self.update.steps
        return Comeback(self.update.steps, lost_at)

    def meet(self, number: int, generations: Sequence[int]) -> None:
        self._generations = generations

    def _present(self) -> list[int]:
        """The ranks that take part in what all do together."""
        generations = self._generations
        if generations is None:
            return list(range(self.size))
        return [r for r in range(self.size) if generations[r] == self.ranks.incarnation(r)]

    def _wait_for(self, is_behind: Callable[[int], bool]) -> None:
        """Until none of the others that still train is behind."""

        def behind() -> str:
            late = [peer for peer in self._present() if is_behind(peer)]
            return " and ".join(f"rank {r}" for r in late if not self.ranks.has_finished(r))

        wait = waiting(f"rank {self.rank}", behind, "the end of a step")
        until(lambda: not behind() or None, wait, math.inf, AssertionError)

    def close(self) -> None:
        self.ranks.close()


def _join_lasting(
    replica: Replica, run_dir: RunDir, num_bytes: int, fill: Callable[[mmap.mmap], None]
) -> LastingMemory:
    """All workers call it, each when it comes."""
    rank = replica.group.rank
    name = broadcast_bytes(replica.group, secrets.token_hex(8).encode(), 0)
    folder = run_dir.memory_folder(name.decode())
    try:
        joined = LastingMemory.join(folder, rank, num_bytes, fill, run_dir.joins.is_dir())
        if joined.is_left and run_dir.finished_ranks():
            joined.close()
            raise RunOver(rank)
        return joined
    except MemoryGone as error:
        if run_dir.finished_ranks():
            raise RunOver(rank) from error
        doing = "opening the memory of the weights, which is gone with the last worker"
        raise PeerLost(rank, None, doing) from error


# ---------------------------------------------------------------------- BatchNorm's statistics

_EVERY_S = 1.0


class KeptStatistics:
    """Running statistics of one worker, where each has its own and servers hold the weights.

    Every worker writes its own into a file of the run, at most once a second, and one that comes
    back begins with the latest of them.
    """

    def __init__(self, folder: Path, rank: int, tensors: Sequence[Tensor]):
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self._rank = rank
        self._tensors = tensors
        self._num_bytes = aligned_bytes(tensor.nbytes for tensor in tensors)
        self._written_s = -_EVERY_S

    def keep(self) -> None:
        """A step is done. A full disk loses no more than a second chance."""
        now_s = clock.monotonic()
        if now_s - self._written_s < _EVERY_S:
            return
        self._written_s = now_s
        page = torch.zeros(self._num_bytes, dtype=torch.uint8)
        for view, tensor in zip(views_in(page, self._tensors), self._tensors, strict=True):
            view.copy_(tensor.detach())
        with suppress(OSError):
            file = self._folder / f"{self._rank}.statistics"
            write_atomically(file, page.numpy().tobytes())
            os.utime(file, ns=(clock.monotonic_ns(),) * 2)

    def take(self) -> bool:
        """Use the latest that a worker has written; False if there are none."""
        files = sorted(self._folder.glob("*.statistics"))
        files.sort(key=lambda file: file.stat().st_mtime_ns)
        if not files or files[-1].stat().st_size != self._num_bytes:
            return False
        page = torch.frombuffer(bytearray(files[-1].read_bytes()), dtype=torch.uint8)
        for view, tensor in zip(views_in(page, self._tensors), self._tensors, strict=True):
            tensor.detach().copy_(view)
        return True


def kept_statistics(replica: Replica) -> KeptStatistics | None:
    """None without BatchNorm, and where lost workers do not come back. All workers call it."""
    run_dir = replica.config.run_dir
    if run_dir is None or not comes_back(replica) or not replica.statistics:
        return None
    name = broadcast_bytes(replica.group, secrets.token_hex(8).encode(), 0).decode()
    return KeptStatistics(run_dir.memory_folder(name), replica.group.rank, replica.statistics)
