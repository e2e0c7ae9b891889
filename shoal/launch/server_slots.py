"""Which of the reserved slots each server takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shoal.launch.replication import Replication


def spread_copies(nodes: Sequence[str], replication: Replication) -> list[int]:
    """For each server the number of a slot, given the nodes of slots, one for each server.

    Copies of a shard are on different nodes where the slots allow it: a node with many slots left
    is taken before one with few.
    """
    left = list(range(len(nodes)))
    used: dict[int, set[str]] = {}
    chosen = []
    for server in range(len(nodes)):
        taken = used.setdefault(replication.shard_of(server), set())
        counts = Counter(nodes[slot] for slot in left)
        slot = min(left, key=lambda s: (nodes[s] in taken, -counts[nodes[s]], s))
        left.remove(slot)
        taken.add(nodes[slot])
        chosen.append(slot)
    return chosen
