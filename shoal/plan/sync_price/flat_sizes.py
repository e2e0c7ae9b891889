"""How many numbers buckets and shards have, as the runtime lays parameters out in one flat buffer.

`TensorSizes` knows every tensor and is exact: it is the runtime's own layout. `EvenSizes` knows how
many numbers there are, and takes them to be divisible as one likes; a model of billions is nearly
so. Sizes are in elements. A rank is that of a replica.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.schedules.buffer_layout import (
    FIRST_BUCKET_BYTES,
    ON_THE_WAY,
    BufferLayout,
    held_shards,
    shard_edges,
    sharded_bucket_bytes,
)


class Buckets(NamedTuple):
    """Equal buckets."""

    number: int
    elements: float
    waiting: float  # elements of tensors in one, without gaps


class Factors(NamedTuple):
    """Elements that PowerSGD sends of a model: P, Q, and what is sent as it is."""

    left: float
    right: float
    rest: float


@dataclass(frozen=True)
class EvenSizes:
    """So many numbers in layers of about `layer` numbers."""

    size: float
    width: float = 4  # bytes of an element
    layer: float = 0.0  # numbers of the largest layer
    pair: float = 0.0  # of two layers, one after the other: zero(3) gathers one beside the other
    largest_tensor: float = 0.0

    offset = 0.0
    tensors = 0
    cast_share = 1.0

    @property
    def trained(self) -> float:
        return self.size

    @property
    def first_units(self) -> float:
        return self.layer

    def filled(self, num_bytes: float, first_bytes: float | None = None) -> list[Buckets]:
        wanted = num_bytes / self.width
        first = min(self.size, (first_bytes or num_bytes) / self.width)
        full, rest = divmod(self.size - first, wanted)
        found = [(1, first), (int(full), wanted), (int(rest > 0.5), rest)]
        return [Buckets(number, size, size) for number, size in found if number]

    def in_place(self, num_bytes: float) -> float:
        """All, where an eighth of a layer is as large."""
        tensor_bytes = (self.layer or self.size) * self.width / 8
        return self.size if tensor_bytes >= num_bytes else 0.0

    def gradients(
        self, num_bytes: float, first_bytes: float | None, in_place_bytes: float, adds_up: bool
    ) -> float:
        in_place = self.in_place(in_place_bytes)
        if adds_up or in_place:
            return self.size + self.size
        return self.size + max(one.waiting for one in self.filled(num_bytes, first_bytes))

    def shard_sizes(self, replicas: int) -> list[float]:
        return [self.size / replicas] * replicas

    def owned(self, replicas: int, rank: int) -> float:
        return self.size / replicas

    def zero_buckets(self, replicas: int) -> list[Buckets]:
        num_bytes = sharded_bucket_bytes(self.size * self.width, replicas)
        return self.filled(num_bytes, min(num_bytes, FIRST_BUCKET_BYTES))

    def zero_gradients(
        self, stage: int, shards: tuple[int, int, int], accumulates: bool, is_stage: bool
    ) -> float:
        """A buffer, or a shard with two buckets on their way, and what waits for a full bucket."""
        rank, ranks, copies = shards
        bucket_bytes = sharded_bucket_bytes(self.size * self.width, ranks)
        bucket = min(self.size, max(self.largest_tensor, bucket_bytes / self.width))
        waits = self.size if is_stage or (accumulates and stage == 1) else bucket
        if stage == 1:
            return self.size + waits
        shard = self.size / ranks
        others = len(held_shards(rank, ranks, copies)) - 1
        return shard + ON_THE_WAY * bucket + waits + others * shard

    def zero_gathered(self, replicas: int, held: Sequence[int]) -> float:
        return min(self.pair, self.size) * (1 - len(held) / replicas)

    def factors(self, rank: int) -> Factors:
        """Square matrices: 8 of them in a layer."""
        side = math.sqrt((self.layer or self.size) / 8)
        share = min(1.0, 2 * rank / max(1.0, side))
        return Factors(share / 2 * self.size, share / 2 * self.size, 0.0)

    def servers(self, count: int) -> float:
        return self.size / count


class TensorSizes(BufferLayout):
    """The trained tensors of a worker's model, in order.

    `units` are those that zero(3) gathers together, the root first.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        units: Sequence[tuple[int, ...]] = (),
        width: int = 4,
        untrained: float = 0.0,
        cast: frozenset[int] = frozenset(),
    ):
        """`cast`: those that zero(3) gathers in the dtype of autocast."""
        super().__init__([math.prod(shape) for shape in shapes], width, width >= 4)
        self.shapes = shapes
        self.untrained = untrained  # numbers of buffers and frozen parameters
        self.cast = cast
        self.units = tuple(units) or (tuple(range(len(shapes))),)
        self.tensors = len(shapes)
        self.trained = sum(self.sizes)
        self.cast_share = self.gathered_share(cast)
        self.largest_tensor = max(self.sizes)

    def filled(self, num_bytes: float, first_bytes: float | None = None) -> list[Buckets]:
        """In the order in which backward fills them."""
        return [self._bucket(one) for one in self.buckets(num_bytes, first_bytes)]

    def _bucket(self, bucket: slice) -> Buckets:
        return Buckets(1, bucket.stop - bucket.start, self.waiting(bucket))

    def gradients(
        self, num_bytes: float, first_bytes: float | None, in_place_bytes: float, adds_up: bool
    ) -> float:
        buckets = self.buckets(num_bytes, first_bytes)
        return self.bucketed_gradients(buckets, in_place_bytes, adds_up)

    def shard_sizes(self, replicas: int) -> list[float]:
        return [shard.stop - shard.start for shard in self.shards(replicas)]

    def owned(self, replicas: int, rank: int) -> float:
        """Elements of the tensors of a shard."""
        return self.waiting(self.shards(replicas)[rank])

    def zero_buckets(self, replicas: int) -> list[Buckets]:
        """None crosses the border of a shard."""
        num_bytes = sharded_bucket_bytes(self.size * self.width, replicas)
        return [self._bucket(one) for _, one in self.owned_buckets(replicas, num_bytes)]

    def zero_gathered(self, replicas: int, held: Sequence[int]) -> float:
        """Under zero(3), of a rank that holds these shards: what it has of the other ones."""
        shards = self.shards(replicas)
        here = {i for one in held for i in self.params_in(shards[one])}
        return self.gathered_bytes(self.units, self.owners(replicas), here, self.cast) / self.width

    @property
    def first_units(self) -> float:
        """Elements of the root unit and of the first block, which zero(3) gathers once."""
        kept = set(self.units[:2])
        return sum(self.round_up(self.sizes[i]) for unit in kept for i in unit)

    def factors(self, rank: int) -> Factors:
        left = right = rest = 0
        for shape, size in zip(self.shapes, self.sizes, strict=True):
            rows = shape[0] if len(shape) > 1 else 1
            columns = size // rows
            thin = min(rank, rows, columns)
            if thin * (rows + columns) < size:
                left += rows * thin
                right += columns * thin
            else:
                rest += size
        return Factors(left, right, rest)

    def servers(self, count: int) -> float:
        """The largest slice where slices end between tensors, or rows of a large one."""
        equal = (self.size - self.offset) / count
        allowed = {self.offset, self.size, *self.starts}
        for shape, start, size in zip(self.shapes, self.starts, self.sizes, strict=True):
            if size > equal:
                allowed.update(range(start, start + size, math.prod(shape[1:])))
        edges = shard_edges(sorted(allowed), count)
        return max(b - a for a, b in itertools.pairwise(edges))


FlatSizes = EvenSizes | TensorSizes
