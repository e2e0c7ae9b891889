"""What becomes of a sharded dimension when a tensor is reshaped, cut or concatenated.

Ranges of a rank are in ascending order, and so is its shard; each function keeps that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.replica.tensor.activations.shard_spec import ShardSpec

Ranges = tuple[range, ...]

_MOST_RANGES = 256  # of a rank: beyond it, a tensor is gathered


def merged(spec: ShardSpec) -> ShardSpec:
    """The same spec, with ranges that touch joined: equal shards have equal specs."""
    return ShardSpec(spec.dim, tuple(_merged(ranges) for ranges in spec.ranges))


def narrowed(spec: ShardSpec, start: int, length: int) -> ShardSpec:
    """Of `narrow` along the sharded dimension."""
    stop = start + length

    def part(ranges: Ranges) -> Ranges:
        cut = [range(max(r.start, start), min(r.stop, stop)) for r in ranges]
        return tuple(range(r.start - start, r.stop - start) for r in cut if len(r))

    return ShardSpec(spec.dim, tuple(part(ranges) for ranges in spec.ranges))


def concatenated(specs: Sequence[ShardSpec]) -> ShardSpec:
    """Of `cat` along the sharded dimension."""
    ranks = len(specs[0].ranges)
    found: list[list[range]] = [[] for _ in range(ranks)]
    start = 0
    for spec in specs:
        for rank in range(ranks):
            found[rank] += [range(start + r.start, start + r.stop) for r in spec.ranges[rank]]
        start += spec.size
    return merged(ShardSpec(specs[0].dim, tuple(map(tuple, found))))


def reshaped_spec(spec: ShardSpec, old: Sequence[int], new: Sequence[int]) -> ShardSpec | None:
    """Of `reshape`; None if no dimension of the new shape is sharded as this one was."""
    group = _dims_around(spec.dim, old, new)
    if group is None:
        return None
    old_dims, new_dims = group
    outer = math.prod(old[old_dims.start : spec.dim])
    inner = math.prod(old[spec.dim + 1 : old_dims.stop])
    if outer * max(map(len, spec.ranges)) > _MOST_RANGES:
        return None
    flat = _flattened(spec, outer, inner)
    for dim in new_dims:
        after = math.prod(new[dim + 1 : new_dims.stop])
        found = _unflattened(flat, dim, new[dim], after)
        if found is not None:
            return found
    return None


def _dims_around(dim: int, old: Sequence[int], new: Sequence[int]) -> tuple[range, range] | None:
    """The fewest dimensions around `dim`, and those of the new shape that have their elements."""
    i = j = 0
    while i < len(old) and j < len(new):
        first = (i, j)
        a, b = old[i], new[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b and i < len(old):
                a, i = a * old[i], i + 1
            elif b < a and j < len(new):
                b, j = b * new[j], j + 1
            else:
                return None
        if first[0] <= dim < i:
            return range(first[0], i), range(first[1], j)
    return None


def _flattened(spec: ShardSpec, outer: int, inner: int) -> ShardSpec:
    """Over one dimension of outer * size * inner elements."""
    size = spec.size
    ranges = tuple(
        tuple(
            range((o * size + r.start) * inner, (o * size + r.stop) * inner)
            for o in range(outer)
            for r in own
        )
        for own in spec.ranges
    )
    return merged(ShardSpec(0, ranges))


def _unflattened(flat: ShardSpec, dim: int, size: int, inner: int) -> ShardSpec | None:
    """Sharded along one dimension of `size`, with `inner` elements behind each index of it."""
    block = size * inner
    first = narrowed(flat, 0, block)
    for start in range(0, flat.size, block):
        if narrowed(flat, start, block) != first:
            return None
    if any(r.start % inner or r.stop % inner for own in first.ranges for r in own):
        return None
    if not all(first.ranges):
        return None
    ranges = tuple(tuple(range(r.start // inner, r.stop // inner) for r in o) for o in first.ranges)
    return ShardSpec(dim, ranges)


def _merged(ranges: Ranges) -> Ranges:
    joined: list[range] = []
    for r in ranges:
        if joined and joined[-1].stop == r.start:
            joined[-1] = range(joined[-1].start, r.stop)
        else:
            joined.append(r)
    return tuple(joined)
