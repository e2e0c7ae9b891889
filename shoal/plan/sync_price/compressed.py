"""Sums over replicas in fewer bytes: their time on the links, their arithmetic, their memory.

How many bytes `compress="…"` makes of some numbers, as the runtime packs them.

fp16 bf16 int8 int4 …         sums by shards: an all-to-all of packed shards, then an
                              all-gather of packed sums: 2 (p-1)/p of the packed size
powersgd                      all-reduces of P and of Q
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shoal.plan.sync_price import SyncQuestion
from shoal.plan.sync_price.flat_sizes import Buckets, Factors, FlatSizes
from shoal.strategy.options import read_setting

_INT8_CHUNK = 256
_INT4_CHUNK = 64
_ONEBIT_CHUNK = 512
_TOPK_BLOCK = 65_536
_MOST_KEPT = 4  # topk: a sum has at most so many times the elements that a replica sends


class Packed(NamedTuple):
    """Bytes of one sum over replicas."""

    sent: float  # by one worker
    gradients: float  # packed, of one worker's own
    sums: float  # packed, of the sum of all
    passes: float  # how often packing and unpacking reads and writes the numbers


def packed_bytes(compress: str, elements: float) -> float:
    """A message of so many numbers; PowerSGD depends on shapes instead (`FlatSizes.factors`)."""
    name, settings = read_setting(compress)
    return math.ceil(_raw_bytes(name, settings, elements) / 4) * 4


def _raw_bytes(name: str, settings: dict[str, float], elements: float) -> float:
    match name:
        case "bf16":
            return 2 * elements
        case "fp16":
            return 4 + 2 * elements
        case "int8":
            return 4 * math.ceil(elements / _INT8_CHUNK) + elements
        case "int4":
            return 2 * math.ceil(elements / _INT4_CHUNK) + math.ceil(elements / 2)
        case "onebit":
            return 4 + math.ceil(elements / _ONEBIT_CHUNK) * (2 + _ONEBIT_CHUNK // 8)
        case "topk":
            return 4 * _kept(settings[""], elements)
    raise ValueError(name)


def _kept(fraction: float, elements: float) -> float:
    """Of every block of 65,536 elements the largest."""
    full, rest = divmod(elements, _TOPK_BLOCK)
    last = min(rest, max(1, math.ceil(fraction * rest)))
    return full * max(1, math.ceil(fraction * _TOPK_BLOCK)) + last


def sum_compress(compress: str, replicas: int) -> str:
    """How sums are packed: those of topk have the elements of several replicas."""
    name, settings = read_setting(compress)
    if name != "topk":
        return compress
    return f"topk({min(1.0, settings[''] * min(replicas, _MOST_KEPT))})"


def factors_of(compress: str, sizes: FlatSizes) -> Factors | None:
    """What PowerSGD sends; None of other ways to compress."""
    name, settings = read_setting(compress)
    return sizes.factors(int(settings["rank"])) if name == "powersgd" else None


def packed_sum(compress: str, sizes: FlatSizes, elements: float, n: int) -> Packed:
    """The sum over n replicas of so many elements of a buffer."""
    if (factors := factors_of(compress, sizes)) is not None:
        message = 4 * sum(factors)
        return Packed(2 * (n - 1) / n * message, message, message, 6.0)
    shard = math.ceil(elements / n)
    own = n * packed_bytes(compress, shard)
    sums = n * packed_bytes(sum_compress(compress, n), shard)
    return Packed((n - 1) / n * (own + sums), own, sums, 4.0 if n == 1 else 4 + 2 / n)


RESIDUAL_BYTES = 4
INDEX_BYTES = 8


class CompressedTime(NamedTuple):
    links_s: float
    packing_s: float
    bound: str
    sent_bytes: float


def compressed_time(question: SyncQuestion, compress: str, elements: float) -> CompressedTime:
    """One sum of so many elements: packed shards to their owners, packed sums to all."""
    packed = packed_sum(compress, question.sizes, elements, question.replicas)
    packing_s = question.device.pass_s(packed.passes * elements * question.width)
    if factors_of(compress, question.sizes) is not None:
        took = question.collective("all_reduce", packed.gradients)
        return CompressedTime(took.seconds, packing_s, took.bound, packed.sent)
    there = question.collective("all_to_all", packed.gradients)
    back = question.collective("all_gather", packed.sums)
    slower = max(there, back)
    return CompressedTime(there.seconds + back.seconds, packing_s, slower.bound, packed.sent)


def compressed_memory(
    question: SyncQuestion, compress: str, slices: list[Buckets], at_once: int | None = None
) -> float:
    """What is kept from step to step, and the most that is on its way: `at_once` of all slices."""
    sizes, n, gaps = question.sizes, question.replicas, question.gaps
    kept = sizes.size * RESIDUAL_BYTES + INDEX_BYTES * gaps
    number = sum(bucket.number for bucket in slices)
    share = min(number, at_once or number) / number
    if (factors := factors_of(compress, sizes)) is not None:
        left, right, rest = factors
        first = question.body * RESIDUAL_BYTES + 4 * (left + 2 * rest)
        return kept + 4 * right + share * max(first, 4 * (left + rest + right))
    again = sum_compress(compress, n)
    owed = sum(bucket.number * -(-bucket.elements // n) for bucket in slices)
    first = sum(2 * n * b.number * packed_bytes(compress, -(-b.elements // n)) for b in slices)
    second = sum((n + 1) * b.number * packed_bytes(again, -(-b.elements // n)) for b in slices)
    owed_bytes = owed * RESIDUAL_BYTES + INDEX_BYTES * gaps / n
    return kept + owed_bytes + share * max(first, second)
