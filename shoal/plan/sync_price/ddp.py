"""ddp: gradients are all-reduced bucket by bucket while backward runs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from shoal.plan.prediction import DeviceMemory, Part
from shoal.plan.step.collective_time import CollectiveTime, hops
from shoal.plan.sync_price.base import (
    Agreeing,
    SyncPrice,
    SyncQuestion,
    bucketed_gradients,
    buckets_in_turn,
    buckets_of,
    exposed_buckets,
    hidden_s,
    idle_share,
    plain_memory,
    some,
    synchronous_spread,
    update_part,
    waiting_part,
)
from shoal.plan.sync_price.compressed import compressed_memory, compressed_time
from shoal.plan.sync_price.flat_sizes import Buckets
from shoal.schedules.buffer_layout import DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES, LARGE_BYTES
from shoal.schedules.collectives.cost import Link, predicted_s

_MOST_COUNTED = 128  # ranks; schedules over more are priced as the closed form of a ring


def ddp(term: Any, question: SyncQuestion) -> SyncPrice:
    if question.replicas == 1:
        parts = some(waiting_part(question), update_part(question))
        return SyncPrice(parts, _memory(term, question), spread_s=synchronous_spread(question))
    gradients, sent = _compressed(term, question) if term.compress else _exact(term, question)
    parts = some(gradients, waiting_part(question), update_part(question))
    spread = synchronous_spread(question)
    return SyncPrice(
        parts,
        _memory(term, question),
        sent_bytes=sent,
        agreeing=_agreeing(term, question),
        spread_s=spread,
    )


def _agreeing(term: Any, question: SyncQuestion) -> Agreeing:
    algorithm = term.collective_algorithm or "auto"
    return Agreeing(
        "all_reduce",
        buckets_of(question, term.bucket_mb * (1 << 20)),
        node_devices=1 if algorithm == "ring" else question.cluster.node.devices,
        algorithm=algorithm,
    )


def _buckets(term: Any, question: SyncQuestion) -> list[Buckets]:
    bucket_bytes = term.bucket_mb * (1 << 20)
    return question.sizes.filled(bucket_bytes, min(bucket_bytes, FIRST_BUCKET_BYTES))


def _exact(term: Any, question: SyncQuestion) -> tuple[Part, float]:
    def timer(num_bytes: float) -> CollectiveTime:
        return all_reduce_time(question, term.collective_algorithm, num_bytes)

    buckets = _buckets(term, question)
    # without an idle core calls follow backward, one after the other
    exposed = exposed_buckets if idle_share(question) else buckets_in_turn
    seconds, bound = exposed(question, buckets, timer)
    p = question.replicas
    return Part("gradients", seconds, bound), 2 * (p - 1) / p * question.buffer_bytes


def all_reduce_time(
    question: SyncQuestion, algorithm: str | None, num_bytes: float
) -> CollectiveTime:
    """The algorithm that was asked for, at the rate of the narrowest hop of its ranks."""
    group = question.group
    if algorithm in (None, "auto", "hierarchical") or group.size > _MOST_COUNTED:
        return question.network.collective("all_reduce", group, num_bytes)
    way = hops(question.cluster, group)
    narrow = min(way, key=lambda hop: hop.bytes_per_s)
    link = Link(max(hop.alpha_s for hop in way), 1 / narrow.bytes_per_s)
    assert algorithm is not None
    seconds = _schedule_s(algorithm, group.size, max(1, round(num_bytes)), link)
    return CollectiveTime(seconds, narrow.words)


@lru_cache(maxsize=4096)
def _schedule_s(algorithm: str, ranks: int, num_bytes: int, link: Link) -> float:
    return predicted_s("all_reduce", algorithm, ranks, num_bytes, link)


def _compressed(term: Any, question: SyncQuestion) -> tuple[Part, float]:
    """Buckets are packed and on their way while backward runs; sums follow when it has ended."""
    sizes = question.sizes
    body = sizes.size - sizes.offset
    took = compressed_time(question, term.compress, body)
    header_bytes = sizes.offset * question.precision.gradient_bytes
    hidden = min(hidden_s(question), took.links_s / 2)
    seconds = took.links_s - hidden + took.packing_s
    p = question.replicas
    return Part("gradients", seconds, took.bound), took.sent_bytes + 2 * (p - 1) / p * header_bytes


def _memory(term: Any, question: SyncQuestion) -> DeviceMemory:
    bucket_bytes = term.bucket_mb * (1 << 20)
    first_bytes = min(bucket_bytes, FIRST_BUCKET_BYTES)
    plain = plain_memory(question)
    if term.compress is None:
        held = bucketed_gradients(question, bucket_bytes, first_bytes, LARGE_BYTES)
        return replace(plain, gradients=held)
    sizes = question.sizes
    extra = compressed_memory(question, term.compress, _buckets(term, question))
    gap_index = 8 * (sizes.size - sizes.offset - sizes.trained)
    return replace(
        plain,
        gradients=bucketed_gradients(question, bucket_bytes, first_bytes),
        buffers=gap_index + extra.residuals + extra.in_flight,
    )


def single(term: Any, question: SyncQuestion) -> SyncPrice:
    parts = some(waiting_part(question), update_part(question))
    return SyncPrice(parts, plain_memory(question), spread_s=synchronous_spread(question))


def mapreduce(term: Any, question: SyncQuestion) -> SyncPrice:
    """Priced as one step a batch; batch="full" agrees once for the batches of the whole dataset."""
    p = question.replicas
    if p == 1:
        return SyncPrice((update_part(question),), plain_memory(question))

    def timer(num_bytes: float) -> CollectiveTime:
        return question.network.collective("broadcast", question.group, num_bytes)

    seconds, bound = exposed_buckets(question, question.sizes.filled(DEFAULT_BUCKET_BYTES), timer)
    out = timer(question.parameter_bytes)
    parts = some(
        Part("gradients", seconds, bound),
        Part("weights", out.seconds, out.bound),
        waiting_part(question),
        update_part(question),
    )
    whole = "one update for the whole dataset" if term.batch == "full" else ""
    accumulated = replace(question, microbatches=2) if term.batch == "full" else question
    memory = replace(
        plain_memory(question),
        gradients=bucketed_gradients(accumulated, DEFAULT_BUCKET_BYTES),
    )
    sent = 2 * (p - 1) / p * question.buffer_bytes
    spread = synchronous_spread(question)
    agreeing = Agreeing("all_reduce", node_devices=question.cluster.node.devices)
    return SyncPrice(
        parts, memory, convergence=whole, sent_bytes=sent, agreeing=agreeing, spread_s=spread
    )
