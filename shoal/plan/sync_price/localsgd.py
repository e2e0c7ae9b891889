"""localsgd: replicas train alone for `every` steps, then average or take an outer step.

A step carries its share of a round: one all-reduce of the difference to the last agreement, which
nothing hides. Workers wait for each other once a round, so that part of their noise cancels out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shoal.plan.prediction import DeviceMemory, Part
from shoal.plan.sync_price.base import (
    Agreeing,
    SyncPrice,
    SyncQuestion,
    memory_pass_s,
    plain_memory,
    rollback_bytes,
    rollback_part,
    some,
    synchronous_spread,
    update_part,
    waiting_part,
)
from shoal.plan.sync_price.compressed import compressed_memory, compressed_time
from shoal.plan.sync_price.flat_sizes import Buckets
from shoal.strategy.options import outer_settings

_PASSES = 9  # difference (3), division (2), step from the agreement (2), copy of it (2)


def localsgd(term: Any, question: SyncQuestion) -> SyncPrice:
    replicas = question.replicas
    agreed, sent = _round(term, question) if replicas > 1 else (Part("weights", 0.0, ""), 0.0)
    passes = _PASSES + (4 if term.outer else 0)
    arithmetic_s = memory_pass_s(question, passes * question.parameter_bytes)
    outer = Part("outer step", arithmetic_s / term.every, "memory")
    weights = Part("weights", agreed.seconds / term.every, agreed.bound)
    copies = rollback_part(question, term.every) if term.elastic else Part("copies", 0.0, "")
    waiting = waiting_part(question, term.every)
    low, high = synchronous_spread(question)
    return SyncPrice(
        some(weights, outer, copies, waiting, update_part(question)),
        _memory(term, question),
        convergence=_convergence(term, replicas),
        sent_bytes=sent / term.every,
        agreeing=Agreeing("average", every=term.every, node_devices=question.cluster.node.devices),
        spread_s=(low, high),
    )


def _round(term: Any, question: SyncQuestion) -> tuple[Part, float]:
    """One agreement: seconds, and bytes that a worker sends."""
    p = question.replicas
    sizes = question.sizes
    width = question.precision.gradient_bytes
    if term.compress is None:
        took = question.network.collective("all_reduce", question.group, question.buffer_bytes)
        sent = 2 * (p - 1) / p * question.buffer_bytes
        return Part("weights", took.seconds, took.bound), sent
    packed = compressed_time(question, term.compress, sizes.size - sizes.offset)
    sent = packed.sent_bytes + 2 * (p - 1) / p * width
    return Part("weights", packed.links_s + packed.packing_s, packed.bound), sent


def _convergence(term: Any, replicas: int) -> str:
    if replicas == 1 or term.every == 1:
        return ""
    return f"replicas agree after {term.every} steps of their own"


def _memory(term: Any, question: SyncQuestion) -> DeviceMemory:
    """With the anchor, the outer optimizer's state, and what compression keeps and sends."""
    sizes = question.sizes
    buffer_bytes = sizes.size * question.precision.parameter_bytes
    gap_index = 8 * (sizes.size - sizes.offset - sizes.trained)
    copies = buffer_bytes + _outer_bytes(term, buffer_bytes) + gap_index
    if term.elastic:
        copies += rollback_bytes(question)
    plain = plain_memory(question)
    if term.compress is None:
        return replace(plain, buffers=copies)
    body = sizes.size - sizes.offset
    packed = compressed_memory(question, term.compress, [Buckets(1, body, body)])
    return replace(plain, buffers=copies + packed.residuals + packed.in_flight + buffer_bytes)


def _outer_bytes(term: Any, buffer_bytes: float) -> float:
    if term.outer is None:
        return 0.0
    name, settings = outer_settings(term.outer)
    if name == "adam":
        return 2 * buffer_bytes
    return buffer_bytes if settings["momentum"] else 0.0
