"""Memory of all workers, where lost ones may come back: `shoal run --restart`."""

from __future__ import annotations

import mmap
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from shoal.comm.objects import broadcast_bytes
from shoal.errors import PeerLost, RunOver
from shoal.runtime.files import write_atomically
from shoal.sync.base import Replica
from shoal.transport.shm.lasting_memory import LastingMemory, MemoryGone


def comes_back(replica: Replica) -> bool:
    """Whether the launcher starts lost workers of this run again."""
    return replica.config.takes_back and replica.config.run_dir is not None


def join_memory(
    replica: Replica, num_bytes: int, fill: Callable[[mmap.mmap], None]
) -> LastingMemory:
    """All workers call it, each when it comes."""
    run_dir = replica.config.run_dir
    assert run_dir is not None
    rank = replica.group.rank
    name = broadcast_bytes(replica.group, secrets.token_hex(8).encode(), 0)
    folder = run_dir.memory_folder(name.decode())
    try:
        joined = LastingMemory.join(folder, rank, num_bytes, fill, run_dir.takes_joins())
        if joined.is_left and run_dir.finished_ranks():
            joined.close()
            raise RunOver(rank)
        return joined
    except MemoryGone as error:
        if run_dir.finished_ranks():
            raise RunOver(rank) from error
        doing = "opening the memory of the weights, which is gone with the last worker"
        raise PeerLost(rank, None, doing) from error


_EVERY_S = 1.0


class KeptStatistics:
    """Those of one worker."""

    def __init__(self, folder: Path, rank: int, tensors: Sequence[Tensor]):
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self._rank = rank
        self._tensors = tensors
        self._written_s = -_EVERY_S

    def keep(self) -> None:
        """A step is done. A full disk loses no more than a second chance."""
        now_s = time.monotonic()
        if now_s - self._written_s < _EVERY_S:
            return
        self._written_s = now_s
        data = b"".join(_bytes_of(tensor.detach().cpu()) for tensor in self._tensors)
        with suppress(OSError):
            write_atomically(self._folder / f"{self._rank}.statistics", data)

    def take(self) -> bool:
        """Use the latest that a worker has written; False if there are none."""
        files = sorted(self._folder.glob("*.statistics"), key=lambda file: file.stat().st_mtime_ns)
        expected = sum(tensor.nbytes for tensor in self._tensors)
        if not files or files[-1].stat().st_size != expected:
            return False
        data = bytearray(files[-1].read_bytes())
        start = 0
        for tensor in self._tensors:
            part = torch.frombuffer(data, dtype=torch.uint8, count=tensor.nbytes, offset=start)
            tensor.detach().copy_(part.clone().view(tensor.dtype).view(tensor.shape))
            start += tensor.nbytes
        return True


def kept_statistics(replica: Replica) -> KeptStatistics | None:
    """None without BatchNorm, and where lost workers do not come back. All workers call it."""
    run_dir = replica.config.run_dir
    if run_dir is None or not comes_back(replica) or not replica.statistics:
        return None
    name = broadcast_bytes(replica.group, secrets.token_hex(8).encode(), 0).decode()
    return KeptStatistics(run_dir.memory_folder(name), replica.group.rank, replica.statistics)


def _bytes_of(tensor: Tensor) -> bytes:
    data: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data
