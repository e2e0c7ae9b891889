"""What backward hides of communication that runs beside it, bucket by bucket, in fixed order.

Backward fills buckets of gradients at an even pace, from the last layer to the first; a bucket is
sent when it is full and the one before is through. Bucket i is ready at r_i, and all are through at
the latest of r_i + (what i and those after it take). Over equal buckets both are linear in i, so
one of the ends decides: the first bucket, behind which all others queue, or the last one, which is
ready when backward ends.

    exposed = max( r_first + all - backward,  last )

Reductions to one rank each follow each other through the links: a rank that has sent its part of a
bucket goes on to the next. Such a bucket adds the time of one message to that of the one before.

On CPUs whose cores all compute, sending takes the time of a core, and nothing is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.plan.step.collective_time import CollectiveTime
from shoal.plan.sync_price.base import SyncQuestion
from shoal.plan.sync_price.flat_sizes import Buckets

Timer = Callable[[float], CollectiveTime]  # of so many bytes


def hidden_s(question: SyncQuestion) -> float:
    """How much of backward can hide communication; on CPUs only idle cores send meanwhile."""
    return question.backward_s * idle_share(question)


def idle_share(question: SyncQuestion) -> float:
    """The share of a worker's communication that costs its computation nothing."""
    if not computes_on_cores(question):
        return 1.0
    node = question.cluster.node
    threads = question.cluster.device.threads
    if node.cores is None or threads is None:
        return 0.0
    workers = min(question.workers, node.devices)
    return max(0.0, 1 - workers * threads / node.cores)


def computes_on_cores(question: SyncQuestion) -> bool:
    """Whether workers are CPU processes, which also do the copying and adding themselves."""
    return question.cluster.device.synchronous


def meetings_s(question: SyncQuestion, calls: int) -> float:
    """What CPU workers that compute between calls wait for each other in them."""
    return calls * question.cluster.device.meet_s if computes_on_cores(question) else 0.0


def exposed_buckets(
    question: SyncQuestion,
    buckets: Sequence[Buckets],
    timer: Timer,
    following: Timer | None = None,
) -> tuple[float, str]:
    """Seconds that are left of the last micro-batch's reduction, and what bounds it.

    `following` times what a bucket adds to one that is under way.
    """
    width = question.precision.gradient_bytes
    sizes = [bucket.elements * width for bucket in buckets]
    times = [_met(question, timer(size)) for size in sizes]
    adds = times
    if following is not None:
        adds = [min(took, following(size)) for size, took in zip(sizes, times, strict=True)]
    all_s = sum(n.number * took.seconds for n, took in zip(buckets, adds, strict=True))
    all_s += times[-1].seconds - adds[-1].seconds
    elements = sum(bucket.number * bucket.elements for bucket in buckets)
    hidden = hidden_s(question)
    first_ready_s = hidden * buckets[0].elements / max(1.0, elements)
    queue_s = first_ready_s + all_s - hidden
    if queue_s <= times[-1].seconds:
        return min(times[-1].seconds, all_s), times[-1].bound
    return min(queue_s, all_s), _bound(buckets, adds)


def buckets_in_turn(
    question: SyncQuestion, buckets: Sequence[Buckets], timer: Timer
) -> tuple[float, str]:
    """Seconds of a reduction that begins after backward; workers meet in its first call."""
    width = question.precision.gradient_bytes
    times = [timer(bucket.elements * width) for bucket in buckets]
    all_s = sum(n.number * took.seconds for n, took in zip(buckets, times, strict=True))
    return all_s + meetings_s(question, 1), _bound(buckets, times)


def _met(question: SyncQuestion, took: CollectiveTime) -> CollectiveTime:
    met_s = meetings_s(question, 1)
    return took._replace(seconds=took.seconds + met_s) if met_s else took


def _bound(buckets: Sequence[Buckets], times: Sequence[CollectiveTime]) -> str:
    """Of the buckets that take longest together."""
    pairs = zip(buckets, times, strict=True)
    of, took = max(pairs, key=lambda pair: pair[0].number * pair[1].seconds)
    if not took.messages:
        return took.bound
    return f"latency of {of.number * took.messages} messages"
