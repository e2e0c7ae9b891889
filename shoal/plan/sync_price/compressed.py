"""Sums over replicas in fewer bytes: their time on the links, their arithmetic, their memory."""

from __future__ import annotations

from typing import NamedTuple

from shoal.plan.sync_price.base import SyncQuestion, memory_pass_s
from shoal.plan.sync_price.flat_sizes import Buckets
from shoal.plan.sync_price.packed import (
    factor_rank,
    is_factored,
    packed_bytes,
    packed_sum,
    sum_compress,
)

_RESIDUAL_BYTES = 4
_INDEX_BYTES = 8


class CompressedTime(NamedTuple):
    links_s: float
    packing_s: float
    bound: str
    sent_bytes: float


def compressed_time(question: SyncQuestion, compress: str, elements: float) -> CompressedTime:
    """One sum of so many elements: packed shards to their owners, packed sums to all."""
    packed = packed_sum(compress, question.sizes, [(1, elements)], question.replicas)
    width = question.precision.gradient_bytes
    packing_s = memory_pass_s(question, packed.passes * elements * width)
    network = question.network
    if is_factored(compress):
        took = network.collective("all_reduce", question.group, packed.gradients)
        return CompressedTime(took.seconds, packing_s, took.bound, packed.sent)
    there = network.collective("all_to_all", question.group, packed.gradients)
    back = network.collective("all_gather", question.group, packed.sums)
    slower = max(there, back)
    return CompressedTime(there.seconds + back.seconds, packing_s, slower.bound, packed.sent)


class CompressedBytes(NamedTuple):
    residuals: float
    in_flight: float


def compressed_memory(
    question: SyncQuestion, compress: str, slices: list[Buckets]
) -> CompressedBytes:
    """What is kept from step to step, and the most that is on its way: all slices at once."""
    sizes = question.sizes
    n = question.replicas
    gaps = sizes.size - sizes.offset - sizes.trained
    kept = sizes.size * _RESIDUAL_BYTES + _INDEX_BYTES * gaps
    if is_factored(compress):
        left, right, rest = sizes.factors(factor_rank(compress))
        first = (sizes.size - sizes.offset) * _RESIDUAL_BYTES + 4 * (left + 2 * rest)
        return CompressedBytes(kept + 4 * right, max(first, 4 * (left + rest + right)))
    again = sum_compress(compress, n)
    owed = sum(bucket.number * -(-bucket.elements // n) for bucket in slices)
    first = sum(2 * n * b.number * packed_bytes(compress, -(-b.elements // n)) for b in slices)
    second = sum((n + 1) * b.number * packed_bytes(again, -(-b.elements // n)) for b in slices)
    owed_bytes = owed * _RESIDUAL_BYTES + _INDEX_BYTES * gaps / n
    return CompressedBytes(kept + owed_bytes, max(first, second))
