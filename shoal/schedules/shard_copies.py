"""Which ranks hold which shard, where each shard is also on the ranks that follow its owner.

    copies=1      rank 0    rank 1    rank 2
    owned         0         1         2
    copied        2         0         1          rank 1 is lost: shard 1 is on rank 2, too

When other ranks form the group, a parameter goes from a rank that has held it to those that hold
it now. All ranks compute the same list of transfers and carry it out in its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ShardTransfer(NamedTuple):
    """A parameter that one rank sends to another."""

    source: int
    target: int
    param: int


def held_shards(rank: int, ranks: int, copies: int) -> list[int]:
    """The shards that a rank holds, its own first; all of them where there are few ranks."""
    return [(rank - distance) % ranks for distance in range(min(copies + 1, ranks))]


def holders(shard: int, ranks: int, copies: int) -> list[int]:
    """The ranks that hold a shard, its owner first."""
    return [(shard + distance) % ranks for distance in range(min(copies + 1, ranks))]


def surviving_holders(
    owners: Sequence[int], ranks: int, copies: int, earlier_ranks: Sequence[int | None]
) -> list[list[int]]:
    """For each parameter the present ranks that have held it; `owners` are its earlier shards.

    `earlier_ranks` are those of the present ranks in the group before, of `ranks` ranks; None for
    a rank that was not in it.
    """
    now = {earlier: rank for rank, earlier in enumerate(earlier_ranks) if earlier is not None}
    of_shard = [
        sorted(now[rank] for rank in holders(shard, ranks, copies) if rank in now)
        for shard in range(ranks)
    ]
    return [of_shard[owner] for owner in owners]


def shard_transfers(
    held_by: Sequence[Sequence[int]], owners: Sequence[int], ranks: int, copies: int
) -> list[ShardTransfer]:
    """What has to be sent so that each parameter is where `owners` says, and on the copies."""
    transfers = []
    for param, (sources, owner) in enumerate(zip(held_by, owners, strict=True)):
        for target in holders(owner, ranks, copies):
            if target not in sources:
                source = sources[target % len(sources)]
                transfers.append(ShardTransfer(source, target, param))
    return transfers
