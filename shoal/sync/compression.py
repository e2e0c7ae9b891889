"""What `compress="…"` means for sums over replicas: which sum, and what it takes.

sharded_sum     fp16 bf16 int8    shards to their owners, which add them up, pack the sum and
                onebit topk       send it to all: 2·(p-1)/p of the packed size, as a ring does
factored_sum    powersgd          all-reduces of P and of Q
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.comm.group import Group
from shoal.compress.catalog import make_compressor
from shoal.compress.compressor import Compressor
from shoal.compress.powersgd import PowerSgd
from shoal.errors import BadInput
from shoal.replica.flat_layout import FlatLayout
from shoal.replica.flat_params import FlatParams
from shoal.strategy.base import SyncTerm
from shoal.sync.base import Copies, StepSettings
from shoal.sync.compressed_sum import CompressedSum, SliceMemory
from shoal.sync.factored_sum import FactoredSum, factored_memory
from shoal.sync.memory import ModelSizes
from shoal.sync.residuals import INDEX_BYTES, residual_dtype, unused_positions
from shoal.sync.sharded_sum import ShardedSum, sharded_memory


class CompressedMemory(NamedTuple):
    """Bytes that a compressed sum takes."""

    residuals: int  # kept from step to step
    in_flight: int  # most at a time, when all slices are under way


def make_compressed_sum(
    text: str,
    flat: FlatParams,
    group: Group,
    slices: Sequence[slice],
    copies: Copies | None = None,
) -> CompressedSum:
    """What `compress="…"` asks for, for these slices of the buffer."""
    unused = unused_positions(flat, copies)
    compressors = _compressors(text, flat, slices)
    factors = {start: c for start, c in compressors.items() if isinstance(c, PowerSgd)}
    first = next(iter(compressors.values()))
    if factors:
        return FactoredSum(flat, group, factors, unused)
    return ShardedSum(flat, group, slices, first, unused)


def compressed_memory(
    text: str, sizes: ModelSizes, slices: Sequence[slice], rank: int, replicas: int
) -> CompressedMemory:
    """What `make_compressed_sum` and its messages take, without making it."""
    flat = sizes.flat
    width = residual_dtype(flat.dtype).itemsize
    kept = flat.size * width + INDEX_BYTES * sizes.unused_in(slice(flat.offset, flat.size))
    slices_memory = []
    for at, compressor in zip(slices, _compressors(text, flat, slices).values(), strict=True):
        if isinstance(compressor, PowerSgd):
            slices_memory.append(factored_memory(compressor, width))
        else:
            slices_memory.append(sharded_memory(sizes, at, compressor, rank, replicas))
    kept += sum(memory.kept for memory in slices_memory)
    return CompressedMemory(kept, _most_in_flight(slices_memory))


def _most_in_flight(slices: Sequence[SliceMemory]) -> int:
    """When backward is over all are in the first stage; they go to the second in turn."""
    moments = [
        [*(m.second for m in slices[:k]), *(m.first for m in slices[k:])]
        for k in range(len(slices) + 1)
    ]
    return max(map(sum, moments))


def refuse_scaled(term: SyncTerm, options: StepSettings) -> None:
    """Compressed gradients must keep their scale between steps."""
    if options.precision == "fp16":
        raise BadInput(
            f'{term} and precision="fp16" exclude each other: the scale of such gradients changes '
            'between steps, and so would what is left to send; take precision="bf16"'
        )


def _compressors(text: str, flat: FlatLayout, slices: Sequence[slice]) -> dict[int, Compressor]:
    return {at.start: make_compressor(text, *_shapes_in(flat, at)) for at in slices}


def _shapes_in(flat: FlatLayout, at: slice) -> tuple[list[tuple[int, Sequence[int]]], int]:
    """Where the parameters of a slice lie in it, and how long it is."""
    shapes: list[tuple[int, Sequence[int]]] = [
        (param.start - at.start, tuple(p.shape))
        for param, p in zip(flat.ranges, flat.params, strict=True)
        if at.start <= param.start < at.stop
    ]
    return shapes, at.stop - at.start
