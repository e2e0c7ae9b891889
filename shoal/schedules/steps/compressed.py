"""Sums over replicas in fewer bytes: what is sent, what is kept, what is on its way.

How many bytes `compress="…"` makes of some numbers, as the runtime packs them.

fp16 bf16 int8 int4 …         sums by shards: an all-to-all of packed shards, then an
                              all-gather of packed sums: 2 (p-1)/p of the packed size
powersgd                      all-reduces of P and of Q
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shoal.schedules.steps.step import Exchange, Messages, What, When
from shoal.schedules.steps.tensor_layout import Buckets, Factors, Layout
from shoal.schedules.steps.worker_model import WorkerModel
from shoal.strategy.options import read_setting

_INT8_CHUNK = 256
_INT4_CHUNK = 64
_ONEBIT_CHUNK = 512
_TOPK_BLOCK = 65_536
_POWERSGD_PASSES = 6.0
_MOST_KEPT = 4  # topk: a sum has at most so many times the elements that a replica sends


class Packed(NamedTuple):
    """Bytes of one sum over replicas."""

    gradients: float  # packed, of one worker's own
    sums: float  # packed, of the sum of all
    passes: float  # how often packing and unpacking reads and writes the numbers


def packed_bytes(compress: str, elements: float) -> float:
    """A message of so many numbers; PowerSGD depends on shapes instead (`factors_of`)."""
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


def factors_of(compress: str, layout: Layout, where: slice) -> Factors | None:
    """What PowerSGD sends of a slice; None of other ways to compress."""
    name, settings = read_setting(compress)
    return layout.factors(int(settings["rank"]), where) if name == "powersgd" else None


def packed_sum(compress: str, layout: Layout, where: slice, n: int) -> Packed:
    """The sum over n replicas of a slice of the buffer."""
    if (factors := factors_of(compress, layout, where)) is not None:
        message = 4 * sum(factors)
        return Packed(message, message, _POWERSGD_PASSES)
    shard = math.ceil((where.stop - where.start) / n)
    own = n * packed_bytes(compress, shard)
    sums = n * packed_bytes(sum_compress(compress, n), shard)
    return Packed(own, sums, 4.0 if n == 1 else 4 + 2 / n)


class SliceMemory(NamedTuple):
    """Bytes that the sums of equal slices take."""

    kept: float  # from step to step, besides the residual
    first: float  # in flight in their first stage
    second: float  # in flight in their second stage


def slice_memory(
    compress: str, model: WorkerModel, slices: Buckets, rank: int, replicas: int
) -> SliceMemory:
    """Packed shards leave and arrive; then the packed sums of all shards arrive."""
    where, number, residual = slices.where, slices.number, model.residual_bytes
    if (factors := factors_of(compress, model.layout, where)) is not None:
        left = 4 * (factors.left + factors.rest)
        right = 4 * factors.right
        first = slices.elements * residual + left + 4 * factors.rest
        return SliceMemory(number * right, number * first, number * (left + right) * bool(right))
    shard = -(-slices.elements // replicas)
    start = min(where.stop, where.start + rank * shard)
    owned = slice(start, min(where.stop, start + shard))
    owed = (owned.stop - owned.start) * residual + model.unused_index(owned)
    packed = packed_bytes(sum_compress(compress, replicas), shard)
    first = 2 * replicas * packed_bytes(compress, shard)
    return SliceMemory(number * owed, number * first, number * (replicas + 1) * packed)


def residuals(model: WorkerModel, slices: Sequence[SliceMemory]) -> float:
    """What compressed sums keep from step to step."""
    residual = model.layout.size * model.residual_bytes + model.unused_index(model.body)
    return residual + sum(one.kept for one in slices)


def most_in_flight(slices: Sequence[SliceMemory]) -> float:
    """All begin in the first stage, and go to the second in turn."""
    return max(
        sum(one.second for one in slices[:k]) + sum(one.first for one in slices[k:])
        for k in range(len(slices) + 1)
    )


def compressed_exchanges(
    compress: str,
    layout: Layout,
    slices: Sequence[Buckets],
    replicas: int,
    what: What,
    when: When,
) -> tuple[Exchange, ...]:
    """The two stages of the sums of these slices."""
    if factors_of(compress, layout, slices[0].where) is not None:
        passes = _POWERSGD_PASSES
        factors = [(one.number, factors_of(compress, layout, one.where)) for one in slices]
        sent = [(number, f) for number, f in factors if f is not None]
        stages = [
            ("all_reduce", [Messages(number, 4 * (f.left + f.rest)) for number, f in sent]),
            ("all_reduce", [Messages(number, 4 * f.right) for number, f in sent]),
        ]
    else:
        passes = packed_sum(compress, layout, slices[0].where, replicas).passes
        packed = [(one.number, packed_sum(compress, layout, one.where, replicas)) for one in slices]
        stages = [
            ("all_to_all", [Messages(number, one.gradients) for number, one in packed]),
            ("all_gather", [Messages(number, one.sums) for number, one in packed]),
        ]
    first, second = (Exchange(what, kind, tuple(calls), when) for kind, calls in stages)
    elements = sum(one.number * one.elements for one in slices)
    return first._replace(packing=passes * elements * layout.width), second
