"""Elements of gradients that a replica holds at its fullest under zero."""

from __future__ import annotations

from shoal.plan.sync_price.base import SyncQuestion
from shoal.plan.sync_price.flat_sizes import FIRST_BUCKET_BYTES, Extent, FlatSizes, TensorSizes
from shoal.plan.workloads.workload import Precision
from shoal.schedules.lending import ON_THE_WAY, REUSED_BYTES, FilledBucket, most_lent


def even_gradients(
    sizes: FlatSizes, stage: int, bucket_bytes: float, question: SyncQuestion
) -> float:
    """A buffer, or a shard with two buckets on their way, and what waits for a full bucket.

    A bucket has whole tensors.
    """
    wanted = max(sizes.largest_tensor, bucket_bytes / question.precision.gradient_bytes)
    bucket = min(sizes.elements, wanted)
    adds_up = question.is_stage or (question.accumulates and stage == 1)
    waits = sizes.trained if adds_up else bucket
    if stage == 1:
        return sizes.elements + waits
    return sizes.shard(question.replicas, 0).size + ON_THE_WAY * bucket + waits


def tensor_gradients(
    sizes: TensorSizes, stage: int, bucket_bytes: float, question: SyncQuestion, rank: int
) -> float:
    """The same, bucket by bucket, for one rank."""
    owned = owned_buckets(sizes, question.replicas, bucket_bytes)
    waiting = [sizes.waiting(run) for _, run in owned]
    if question.is_stage or (question.accumulates and stage == 1):
        waiting = [sum(waiting[k:]) for k in range(len(waiting))]
    if stage == 1:
        return sizes.elements - sizes.header + max(waiting)
    passes = 2 if question.accumulates and not question.is_stage else 1
    kept = sizes.shard(question.replicas, rank)
    room = room_elements(question.precision, bucket_bytes)
    filled = [
        FilledBucket(run.size, waits, owner == rank)
        for (owner, run), waits in zip(owned, waiting, strict=True)
    ]
    return kept.size + most_lent(filled, passes, room, REUSED_BYTES / sizes.width)


def owned_buckets(sizes: TensorSizes, ranks: int, num_bytes: float) -> list[tuple[int, Extent]]:
    """Buckets with their owners, last one first; none crosses the border of a shard."""
    first = min(num_bytes, FIRST_BUCKET_BYTES)
    owned: list[tuple[int, Extent]] = []
    for rank, shard in reversed(list(enumerate(sizes.shards(ranks)))):
        runs = sizes.bucket_runs(num_bytes, None if owned else first, shard)
        owned += [(rank, run) for run in runs]
    return owned


def room_elements(precision: Precision, bucket_bytes: float) -> float:
    """What buckets on their way may take together, where there are more than two."""
    return ON_THE_WAY * bucket_bytes // precision.gradient_bytes
