"""single, ddp and zero: replicas reduce gradients bucket by bucket while backward runs."""

from __future__ import annotations

from typing import Any

from shoal.plan.prediction import DeviceMemory, Part
from shoal.plan.sync_price.base import Agreement, SyncPrice, exposed, prices, update_part


@prices("single")
def single(term: Any, question: Agreement) -> SyncPrice:
    return SyncPrice((update_part(question),), _memory(question, 1, 1, 1))


@prices("ddp")
def ddp(term: Any, question: Agreement) -> SyncPrice:
    gradients = _reduced(question, "all_reduce", term.bucket_mb * 1e6)
    return SyncPrice((gradients, update_part(question)), _memory(question, 1, 1, 1))


@prices("zero")
def zero(term: Any, question: Agreement) -> SyncPrice:
    """Stages 1 and 2: reduce-scatter, and all-gather of the weights; 3 gathers twice a step."""
    size = question.group.size
    reduced = _reduced(question, "reduce_scatter", 25e6)
    gathered = question.network.collective("all_gather", question.group, question.parameter_bytes)
    times = 1 if term.stage < 3 else 2 * question.microbatches
    weights = Part("weights", times * gathered.seconds, gathered.bound)
    of = (1 if term.stage < 3 else size, 1 if term.stage < 2 else size, size)
    return SyncPrice((reduced, weights, update_part(question, 1 / size)), _memory(question, *of))


def _reduced(question: Agreement, kind: str, bucket_bytes: float) -> Part:
    took = question.network.collective(kind, question.group, question.gradient_bytes)
    bucket = question.network.collective(
        kind, question.group, min(bucket_bytes, question.gradient_bytes)
    )
    left_s = exposed(took.seconds, question.backward_s, bucket.seconds)
    return Part("gradients", left_s, took.bound)


def _memory(question: Agreement, parameters: int, gradients: int, state: int) -> DeviceMemory:
    """Each kind is divided over so many replicas."""
    return DeviceMemory(
        parameters=question.parameter_bytes / parameters,
        gradients=question.gradient_bytes / gradients,
        optimizer=question.state_bytes / state,
    )
