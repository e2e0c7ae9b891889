"""hogwild: workers update one copy of the weights in shared memory, without locks.

Each worker computes a global batch of its own. No worker waits for another, so the rate is the sum
of their own rates, until the host's memory carries no more: an update reads and writes the shared
weights, and every forward and backward reads what others have just written.
"""

from __future__ import annotations

from typing import Any

from shoal.plan.prediction import Part
from shoal.plan.step.relaxed_rules import own_pace
from shoal.plan.sync_price.base import (
    SyncPrice,
    SyncQuestion,
    plain_memory,
    prices,
    refuse_several_hosts,
    some,
    update_part,
)

_READS = 2  # of the shared weights in a step: forward and backward


@prices("hogwild")
def hogwild(term: Any, question: SyncQuestion) -> SyncPrice:
    """One worker's step, in which the others finish a batch each as well."""
    refuse_several_hosts("hogwild", question)
    replicas = question.replicas
    pace = own_pace(question.cluster.noise, question.each)
    update = update_part(question)
    own_s = question.compute_s * pace + update.seconds
    waits_s = max(0.0, replicas * _bus_s(question) - own_s)
    parts = some(
        Part("stragglers", (pace - 1) * question.compute_s, "noise of workers"),
        Part("shared weights", waits_s, "memory of the host"),
        update,
    )
    behind = f"a gradient is about {replicas - 1} updates old when it is used" * (replicas > 1)
    return SyncPrice(parts, plain_memory(question), convergence=behind)


def _bus_s(question: SyncQuestion) -> float:
    """Seconds of the host's memory that one worker's batch takes for the shared weights."""
    bus = question.cluster.node.memory_bytes_per_s
    if bus is None or question.replicas == 1:
        return 0.0
    moved = (_READS + 2) * question.parameter_bytes + question.gradient_bytes
    return (moved + 2 * question.state_bytes) / bus
