"""The trained tensors of a worker in one flat buffer, where they are known and where they are not.

`TensorLayout` has every tensor: it is the runtime's own layout. `EvenLayout` has so many numbers,
which can be divided as one likes; a model of billions is nearly so. Sizes are in elements.
"""

from __future__ import annotations

import bisect
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
    server_edges,
    sharded_bucket_bytes,
)


class Buckets(NamedTuple):
    """Equal buckets; `where` is the first of them in the buffer."""

    number: int
    where: slice

    @property
    def elements(self) -> float:
        return float(self.where.stop - self.where.start)


class Factors(NamedTuple):
    """Elements that PowerSGD sends: P, Q, and what is sent as it is."""

    left: float
    right: float
    rest: float


class Overlap(NamedTuple):
    """What a slice of the buffer has of a tensor."""

    tensor: int
    elements: float


class PlacedTensor(NamedTuple):
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class EvenLayout:
    """So many numbers in layers of about `layer` numbers: one tensor that divides everywhere."""

    size: float
    width: float = 4  # bytes of an element
    layer: float = 0.0  # numbers of the largest layer
    pair: float = 0.0  # of two, one after the other: zero(3) gathers one beside the other
    largest_tensor: float = 0.0

    offset = header_size = tensors = 0
    cast_share = 1.0

    @property
    def sizes(self) -> tuple[float]:
        return (self.size,)

    @property
    def trained(self) -> float:
        return self.size

    @property
    def first_units(self) -> float:
        return self.layer

    @property
    def largest_unit(self) -> float:
        return self.layer

    def filled(self, num_bytes: float, first_bytes: float | None = None) -> list[Buckets]:
        """Buckets in the order in which backward fills them."""
        wanted = num_bytes / self.width
        first = min(self.size, (first_bytes or num_bytes) / self.width)
        full, rest = divmod(self.size - first, wanted)
        lengths = [(1, first), (int(full), wanted), (int(rest > 0.5), rest)]
        return [Buckets(number, slice(0.0, length)) for number, length in lengths if number]

    def in_place(self, num_bytes: float) -> float:
        """All, where an eighth of a layer is as large."""
        tensor_bytes = (self.layer or self.size) * self.width / 8
        return self.size if tensor_bytes >= num_bytes else 0.0

    def gradients(self, buckets: Sequence[Buckets], in_place_bytes: float, adds_up: bool) -> float:
        """A gradient buffer, and what backward leaves at parameters until a bucket is full."""
        if adds_up or self.in_place(in_place_bytes):
            return self.size + self.size
        return self.size + max(bucket.elements for bucket in buckets)

    def shards(self, ranks: int) -> list[slice]:
        return [slice(r * self.size / ranks, (r + 1) * self.size / ranks) for r in range(ranks)]

    equal_slices = shards

    def server_slices(self, servers: int, by_rows: bool) -> list[slice]:
        return self.shards(servers)

    def overlaps(self, where: slice) -> list[Overlap]:
        return [Overlap(0, where.stop - where.start)]

    def zero_buckets(self, ranks: int) -> list[Buckets]:
        num_bytes = sharded_bucket_bytes(self.size * self.width, ranks)
        return self.filled(num_bytes, min(num_bytes, FIRST_BUCKET_BYTES))

    def update_chunks(self, rank: int, ranks: int) -> list[slice]:
        """The first ones: the others are as long."""
        length = self._bucket(ranks)
        edges = [min(k * length, self.size / ranks) for k in range(4)]
        return [slice(start, stop) for start, stop in itertools.pairwise(edges)]

    def _bucket(self, ranks: int) -> float:
        bucket_bytes = sharded_bucket_bytes(self.size * self.width, ranks)
        return min(self.size, max(self.largest_tensor, bucket_bytes / self.width))

    def zero_gradients(
        self,
        stage: int,
        shards: tuple[int, int, int],
        accumulates: bool,
        is_stage: bool,
        offload: bool,
    ) -> float:
        """A buffer, or a shard with two buckets on their way, and what waits for a full bucket."""
        rank, ranks, copies = shards
        bucket = self._bucket(ranks)
        waits = self.size if is_stage or (accumulates and stage == 1) else bucket
        if stage == 1:
            return self.size + waits
        shard = bucket if offload else self.size / ranks
        others = len(held_shards(rank, ranks, copies)) - 1
        return shard + ON_THE_WAY * bucket + waits + others * shard

    def zero_gathered(self, ranks: int, held: Sequence[int], is_cast: bool) -> float:
        return min(self.pair, self.size) * (1 - len(held) / ranks)

    def factors(self, rank: int, where: slice) -> Factors:
        """Square matrices: 8 of them in a layer."""
        side = math.sqrt((self.layer or self.size) / 8)
        factor = min(1.0, 2 * rank / max(1.0, side)) / 2 * (where.stop - where.start)
        return Factors(factor, factor, 0.0)


class TensorLayout(BufferLayout):
    """The trained tensors of a worker's model, in order.

    `units` are those that zero(3) gathers together, the root first.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        units: Sequence[Sequence[int]] = (),
        width: int = 4,
        cast: frozenset[int] = frozenset(),
    ):
        """`cast`: those that zero(3) gathers in the dtype of autocast."""
        super().__init__([math.prod(shape) for shape in shapes], width, width >= 4)
        self.shapes = shapes
        self.cast = cast
        self.cast_share = self.gathered_share(cast) if shapes else 1.0
        self.units = tuple(map(tuple, units)) or (tuple(range(len(shapes))),)
        self.tensors = len(shapes)
        self.trained = sum(self.sizes)
        self.largest_tensor = max(self.sizes)
        self._server_slices: dict[tuple[int, bool], list[slice]] = {}

    def filled(self, num_bytes: float, first_bytes: float | None = None) -> list[Buckets]:
        """In the order in which backward fills them."""
        return [Buckets(1, where) for where in self.buckets(num_bytes, first_bytes)]

    def gradients(self, buckets: Sequence[Buckets], in_place_bytes: float, adds_up: bool) -> float:
        return self.bucketed_gradients([one.where for one in buckets], in_place_bytes, adds_up)

    def server_slices(self, servers: int, by_rows: bool) -> list[slice]:
        """Remembered: those of tables with many rows take long."""
        asked = servers, by_rows
        if asked not in self._server_slices:
            self._server_slices[asked] = self._divided(servers, by_rows)
        return self._server_slices[asked]

    def _divided(self, servers: int, by_rows: bool) -> list[slice]:
        placed = [PlacedTensor(*pair) for pair in zip(self.starts, self.shapes, strict=True)]
        edges = server_edges(placed, self.size, servers, by_rows)
        return [slice(*pair) for pair in itertools.pairwise(edges)]

    def overlaps(self, where: slice) -> list[Overlap]:
        first = max(0, bisect.bisect_right(self.starts, where.start) - 1)
        last = bisect.bisect_left(self.starts, where.stop)
        found = [
            Overlap(
                i,
                min(where.stop, self.starts[i] + self.sizes[i]) - max(where.start, self.starts[i]),
            )
            for i in range(first, last)
        ]
        return [one for one in found if one.elements > 0]

    def zero_buckets(self, ranks: int) -> list[Buckets]:
        """None crosses the border of a shard."""
        num_bytes = sharded_bucket_bytes(self.size * self.width, ranks)
        return [Buckets(1, where) for _, where in self.owned_buckets(ranks, num_bytes)]

    def zero_gathered(self, ranks: int, held: Sequence[int], is_cast: bool) -> float:
        """Under zero(3), of a rank that holds these shards: what it has of the other ones."""
        shards = self.shards(ranks)
        here = {i for one in held for i in self.params_in(shards[one])}
        cast = self.cast if is_cast else ()
        return self.gathered_bytes(self.units, self.owners(ranks), here, cast) / self.width

    @property
    def first_units(self) -> float:
        """Elements of the root unit and of the first block, which zero(3) gathers once."""
        kept = set(self.units[:2])
        return sum(self.round_up(self.sizes[i]) for unit in kept for i in unit)

    @property
    def largest_unit(self) -> float:
        """Elements of the unit that zero(3) gathers at a time."""
        return max(sum(self.round_up(self.sizes[i]) for i in unit) for unit in self.units)

    def factors(self, rank: int, where: slice) -> Factors:
        """Of the tensors, or rows of them, in a slice."""
        left = right = rest = 0.0
        for tensor, elements in self.overlaps(where):
            shape = self.shapes[tensor]
            rows = 1.0
            if len(shape) > 1:
                rows = elements // math.prod(shape[1:])
            columns = elements // max(1, rows)
            thin = min(rank, rows, columns)
            if thin * (rows + columns) < elements:
                left += rows * thin
                right += columns * thin
            else:
                rest += elements
        return Factors(left, right, rest)


Layout = EvenLayout | TensorLayout
