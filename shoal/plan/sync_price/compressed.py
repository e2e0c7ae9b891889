"""What sums over replicas in fewer bytes take on the links, and packing and unpacking them."""

from __future__ import annotations

from typing import NamedTuple

from shoal.plan.sync_price import SyncQuestion
from shoal.schedules.steps.compressed import factors_of, packed_sum


class CompressedTime(NamedTuple):
    links_s: float
    packing_s: float
    bound: str


def compressed_time(question: SyncQuestion, compress: str, where: slice) -> CompressedTime:
    """One sum of a slice of the buffer: packed shards to their owners, packed sums to all."""
    packed = packed_sum(compress, question.sizes, where, question.replicas)
    packing_s = question.device.pass_s(packed.passes * (where.stop - where.start) * question.width)
    if factors_of(compress, question.sizes, where) is not None:
        took = question.collective("all_reduce", packed.gradients)
        return CompressedTime(took.seconds, packing_s, took.bound)
    there = question.collective("all_to_all", packed.gradients)
    back = question.collective("all_gather", packed.sums)
    slower = max(there, back)
    return CompressedTime(there.seconds + back.seconds, packing_s, slower.bound)
