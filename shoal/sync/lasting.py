"""Memory of all workers, where lost ones may come back: `shoal run --restart`."""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Callable

from shoal.comm.objects import broadcast_bytes
from shoal.errors import PeerLost, RunOver
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
