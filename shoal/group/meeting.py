"""How ranks find out whether they can share memory."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from shoal.group.shm_group import ShmGroup
from shoal.wire.segment import Exchange, is_built, join

_ENTRY = 64
_said = False


def over_store(store: Any, rank: int, size: int) -> Exchange:
    """Ranks that meet at a torch store."""
    rounds = 0

    def exchange(said: bytes) -> list[bytes]:
        nonlocal rounds
        rounds += 1
        store.set(f"shoal/{rounds}/{rank}", said.decode())
        return [store.get(f"shoal/{rounds}/{peer}") for peer in range(size)]

    return exchange


def over_group(world: dist.ProcessGroup) -> Exchange:
    """Ranks that have a process group already."""

    def exchange(said: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(said.ljust(_ENTRY)), dtype=torch.uint8)
        everything = [torch.empty_like(own) for _ in range(dist.get_world_size(world))]
        dist.all_gather(everything, own, group=world)
        return [bytes(entry.tolist()).rstrip() for entry in everything]

    return exchange


def share_memory(world: dist.ProcessGroup, rank: int) -> ShmGroup | None:
    """The ranks of `world` as a group through shared memory; None, and a word, if they cannot."""
    segment = join(over_group(world), rank, dist.get_world_size(world))
    if segment is None:
        say_once(rank)
        return None
    return ShmGroup(segment)


def say_once(rank: int) -> None:
    global _said
    if rank == 0 and not _said:
        why = "between these ranks" if is_built() else "(Shoal was installed without a compiler)"
        print(f"shoal: no shared memory {why}: they communicate over Gloo", file=sys.stderr)
    _said = True
