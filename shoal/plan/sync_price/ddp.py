"""ddp: gradients are all-reduced bucket by bucket while backward runs; and what is like it.

localsgd: replicas train alone for `every` steps, then average or take an outer step. A step carries
its share of a round: one all-reduce of the difference to the last agreement, which nothing hides,
or with `overlap` what is left of it after `delay` steps.
Workers wait for each other once a round, so that part of their noise cancels out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from shoal.plan.prediction import Part
from shoal.plan.step.collective_time import CollectiveTime, hops
from shoal.plan.sync_price import (
    NO_PART,
    ROW_PASSES,
    BucketTimes,
    SyncPrice,
    SyncQuestion,
    some,
)
from shoal.plan.sync_price.compressed import compressed_time
from shoal.schedules.buffer_layout import DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES
from shoal.schedules.collectives.cost import Link, predicted_s
from shoal.schedules.steps.tensor_layout import Buckets

_MOST_COUNTED = 128  # ranks; schedules over more are priced as the closed form of a ring
_PASSES_TO_PULL = 2  # of rows that are copied
_PASSES = 9  # of localsgd: difference (3), division (2), step from the agreement (2), its copy (2)


def single(term: Any, question: SyncQuestion) -> SyncPrice:
    if not question.row_tables:
        return question.waiting_price()
    pulled, pushed = question.row_traffic
    bus = question.node.memory_bytes_per_s or question.device.memory_bytes_per_s
    moved = _PASSES_TO_PULL * pulled + ROW_PASSES * pushed
    return question.waiting_price(Part("rows", moved / bus, "memory of the host"))


def ddp(term: Any, question: SyncQuestion) -> SyncPrice:
    if question.replicas == 1:
        return question.waiting_price()
    gradients = _compressed(term, question) if term.compress else _exact(term, question)
    return question.waiting_price(gradients)


def _buckets(term: Any, question: SyncQuestion) -> list[Buckets]:
    bucket_bytes = term.bucket_mb * (1 << 20)
    return question.sizes.filled(bucket_bytes, min(bucket_bytes, FIRST_BUCKET_BYTES))


def _exact(term: Any, question: SyncQuestion) -> Part:
    if question.idle_share:
        seconds, bound = question.exposed_buckets(question.once(_bucket_times, term))
    else:  # without an idle core calls follow backward, one after the other
        timer = partial(_all_reduce, question, term.collective_algorithm)
        seconds, bound = question.buckets_in_turn(_buckets(term, question), timer)
    return Part("gradients", seconds, bound)


def _bucket_times(question: SyncQuestion, term: Any) -> BucketTimes:
    timer = partial(_all_reduce, question, term.collective_algorithm)
    return question.bucket_times(_buckets(term, question), timer)


def _all_reduce(question: SyncQuestion, algorithm: str | None, num_bytes: float) -> CollectiveTime:
    """The algorithm that was asked for, at the rate of the narrowest hop of its ranks."""
    ranks = question.replicas
    if algorithm is None or algorithm in ("auto", "hierarchical") or ranks > _MOST_COUNTED:
        return question.collective("all_reduce", num_bytes)
    way = hops(question.cluster, question.group)
    narrow = min(way, key=lambda hop: hop.bytes_per_s)
    link = Link(max(hop.alpha_s for hop in way), 1 / narrow.bytes_per_s)
    seconds = predicted_s("all_reduce", algorithm, ranks, max(1, round(num_bytes)), link)
    return CollectiveTime(seconds, narrow.words)


def _compressed(term: Any, question: SyncQuestion) -> Part:
    """Buckets are packed and on their way while backward runs; sums follow when it has ended."""
    took = compressed_time(question, term.compress, question.model.body)
    hidden = min(question.hidden_s, took.links_s / 2)
    seconds = took.links_s - hidden + took.packing_s
    return Part("gradients", seconds, took.bound)


def mapreduce(term: Any, question: SyncQuestion) -> SyncPrice:
    """Priced as one step a batch; batch="full" agrees once for the batches of the whole dataset."""
    if question.replicas == 1:
        return SyncPrice((question.update_part(),))
    timer = partial(question.collective, "broadcast")
    buckets = question.sizes.filled(DEFAULT_BUCKET_BYTES)
    seconds, bound = question.exposed_buckets(question.bucket_times(buckets, timer))
    out = timer(question.parameter_bytes)
    is_full = term.batch == "full"
    return question.waiting_price(
        Part("gradients", seconds, bound),
        Part("weights", out.seconds, out.bound),
        convergence="one update for the whole dataset" if is_full else "",
    )


def localsgd(term: Any, question: SyncQuestion) -> SyncPrice:
    every = term.every
    agreed = _round(term, question) if question.replicas > 1 else NO_PART
    if term.overlap:
        agreed = _left_of(agreed, term, question)
    passes = _PASSES + (4 if term.outer else 0)
    outer_s = question.device.pass_s(passes * question.parameter_bytes)
    parts = some(
        Part("weights", agreed.seconds / every, agreed.bound),
        Part("outer step", outer_s / every, "memory"),
        question.rollback_part(every) if term.elastic else NO_PART,
        question.waiting_part(every),
        question.update_part(),
    )
    is_apart = question.replicas > 1 and every > 1
    return SyncPrice(
        parts,
        convergence=f"replicas agree after {every} steps of their own" if is_apart else "",
        spread_s=question.synchronous_spread(),
    )


def _left_of(agreed: Part, term: Any, question: SyncQuestion) -> Part:
    """What is waited for of a round: of its fragments each has `delay` steps, all have `every`."""
    step_s, fragments = question.compute_s, term.fragments
    late_s = agreed.seconds - fragments * term.steps_under_way * step_s
    return agreed._replace(seconds=max(0.0, late_s, agreed.seconds - term.every * step_s))


def _round(term: Any, question: SyncQuestion) -> Part:
    """The seconds of one agreement."""
    number = term.fragments
    if term.compress is None:
        took = question.collective("all_reduce", question.buffer_bytes / number)
        return Part("weights", number * took.seconds, took.bound)
    body = question.model.body
    fragment = slice(body.start, body.start + (body.stop - body.start) / number)
    packed = compressed_time(question, term.compress, fragment)
    return Part("weights", number * (packed.links_s + packed.packing_s), packed.bound)
