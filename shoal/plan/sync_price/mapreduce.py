"""mapreduce: gradients are reduced to a master, which alone updates and sends the weights out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shoal.plan.prediction import Part
from shoal.plan.step.collective_time import CollectiveTime
from shoal.plan.sync_price.base import (
    SyncPrice,
    SyncQuestion,
    bucketed_gradients,
    plain_memory,
    prices,
    some,
    synchronous_spread,
    update_part,
    waiting_part,
)
from shoal.plan.sync_price.overlap import exposed_buckets
from shoal.schedules.buffer_layout import DEFAULT_BUCKET_BYTES


@prices("mapreduce")
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
    return SyncPrice(parts, memory, convergence=whole, sent_bytes=sent, spread_s=spread)
