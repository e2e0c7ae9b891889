"""The buckets of ZeRO, which lie inside shards, and the memory that they take."""

from __future__ import annotations

import itertools

from shoal.replica.flat_layout import FlatLayout
from shoal.replica.fsdp.held_shards import HeldShards
from shoal.schedules.lending import ON_THE_WAY, REUSED_BYTES, FilledBucket, most_lent
from shoal.strategy.sync_terms.zero import Zero
from shoal.sync.base import DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES
from shoal.sync.memory import ModelSizes

SMALLEST_BUCKET_BYTES = 1 << 20


def owned_buckets(flat: FlatLayout, ranks: int, num_bytes: int) -> list[tuple[int, slice]]:
    """Buckets with their owners, last one first; none crosses the border of a shard."""
    first = min(num_bytes, FIRST_BUCKET_BYTES)
    owned: list[tuple[int, slice]] = []
    for rank, shard in reversed(list(enumerate(flat.shards(ranks)))):
        buckets = flat.buckets(num_bytes, None if owned else first, shard)
        owned += [(rank, bucket) for bucket in buckets]
    return owned


def bytes_of_shards(flat: FlatLayout, replicas: int) -> int:
    """Buckets that are small beside a shard, since they need memory of their own."""
    shard_bytes = flat.size * flat.dtype.itemsize // replicas
    return min(DEFAULT_BUCKET_BYTES, max(SMALLEST_BUCKET_BYTES, shard_bytes // 16))


def gradient_bytes(term: Zero, sizes: ModelSizes, rank: int, replicas: int) -> int:
    """The buffer that is kept, buckets on their way, and what waits at parameters."""
    stage = term.stage
    flat = sizes.flat
    bucket_bytes = bytes_of_shards(flat, replicas)
    owned = owned_buckets(flat, replicas, bucket_bytes)
    waiting = [sum(flat.params[i].numel() for i in flat.params_in(b)) for _, b in owned]
    if sizes.is_stage or (sizes.accumulates and stage == 1):
        waiting = [sum(waiting[k:]) for k in range(len(waiting))]
    if stage == 1:
        return int(flat.size - flat.offset + max(waiting)) * sizes.width
    kept = HeldShards(flat, rank, replicas, term.shard_copies).size
    passes = 2 if sizes.accumulates and not sizes.is_stage else 1
    filled = [
        FilledBucket(bucket.stop - bucket.start, waits, owner == rank)
        for (owner, bucket), waits in zip(owned, waiting, strict=True)
    ]
    room = ON_THE_WAY * bucket_bytes // sizes.width
    most = most_lent(filled, passes, room, REUSED_BYTES / sizes.width)
    return int(kept + most) * sizes.width


def gathered_bytes(sizes: ModelSizes, held: HeldShards) -> int:
    """Bytes of others' parameters: of the root unit, of one that computes, and of the next."""
    flat = sizes.flat
    index = {name: i for i, (name, _) in enumerate(flat.named)}
    here = set(held.params)
    elements = []
    for unit in sizes.units:
        others = [flat.ranges[index[name]] for name in unit if index[name] not in here]
        elements.append(sum(flat.round_up(r.stop) - r.start for r in others))
    root, *blocks = elements
    pairs = [a + b for a, b in itertools.pairwise([0, *blocks, 0])]
    return (root + max(pairs, default=0)) * sizes.width
