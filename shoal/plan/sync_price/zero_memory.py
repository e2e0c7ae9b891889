"""Elements of gradients that a replica holds at its fullest under zero."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.plan.sync_price.base import SyncQuestion
from shoal.plan.sync_price.flat_sizes import FIRST_BUCKET_BYTES, Extent, FlatSizes, TensorSizes
from shoal.plan.workloads.workload import Precision

_ON_THE_WAY = 2  # buckets that are lent memory at once where it is not kept; small ones more


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
    return sizes.shard(question.replicas, 0).size + _ON_THE_WAY * bucket + waits


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
    return kept.size + _most_under_way(owned, waiting, rank, passes, room)


def owned_buckets(sizes: TensorSizes, ranks: int, num_bytes: float) -> list[tuple[int, Extent]]:
    """Buckets with their owners, last one first; none crosses the border of a shard."""
    first = min(num_bytes, FIRST_BUCKET_BYTES)
    owned: list[tuple[int, Extent]] = []
    for rank, shard in reversed(list(enumerate(sizes.shards(ranks)))):
        runs = sizes.bucket_runs(num_bytes, None if owned else first, shard)
        owned += [(rank, run) for run in runs]
    return owned


def _most_under_way(
    owned: list[tuple[int, Extent]], waiting: list[int], rank: int, passes: int, room: float
) -> float:
    """Of buckets that are lent and gradients that wait, at the worst moment of a backward."""
    sizes: list[float] = []
    lent: list[float] = []
    most = 0.0
    for number in range(passes):
        for (owner, run), waits in zip(owned, waiting, strict=True):
            most = max(most, sum(lent) + waits)
            while _must_settle(sizes, run.size, room):
                sizes.pop(0)
                lent.pop(0)
            sizes.append(run.size)
            lent.append(0.0 if owner == rank and number == 0 else run.size)
            most = max(most, sum(lent) + waits)
    return most


def room_elements(precision: Precision, bucket_bytes: float) -> float:
    """What buckets on their way may take together, where there are more than two."""
    return _ON_THE_WAY * bucket_bytes // precision.gradient_bytes


def _must_settle(sizes: Sequence[float], size: float, room: float) -> bool:
    return len(sizes) >= _ON_THE_WAY and sum(sizes) + size > room


def times_settled(buckets: Sequence[float], room: float) -> int:
    """How often a backward waits for a bucket that is on its way, since the next has no room."""
    on_the_way: list[float] = []
    times = 0
    for size in buckets:
        if _must_settle(on_the_way, size, room):
            times += 1
        while _must_settle(on_the_way, size, room):
            on_the_way.pop(0)
        on_the_way.append(size)
    return times
