"""How many numbers buckets and shards have, as the runtime lays parameters out in one flat buffer.

    [ header | p0 .. | p1 ...... | p2 . | p3 ........ ]

`TensorSizes` knows every tensor and is exact. `EvenSizes` knows how many numbers there are, and
takes them to be divisible as one likes; a model of billions is nearly so. Sizes are in elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from shoal.schedules.shards import shard_edges

ALIGN_BYTES = 64
FIRST_BUCKET_BYTES = 1 << 20
LARGE_BYTES = 1 << 20  # a gradient of this size stays where backward has put it


class Extent(NamedTuple):
    """Consecutive elements of the buffer."""

    start: float
    stop: float

    @property
    def size(self) -> float:
        return self.stop - self.start


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


class FlatSizes(Protocol):
    """What prices ask of a layout. A rank is that of a replica."""

    @property
    def elements(self) -> float: ...  # of the buffer, header and gaps included
    @property
    def header(self) -> float: ...
    @property
    def trained(self) -> float: ...  # elements of tensors
    @property
    def tensors(self) -> int: ...
    @property
    def largest_tensor(self) -> float: ...
    def buckets(self, num_bytes: float, first_bytes: float | None = None) -> list[Buckets]:
        """In the order in which backward fills them."""
        ...

    def in_place(self, num_bytes: float) -> float:
        """Elements of tensors of at least so many bytes."""
        ...

    def largest_wait(self, buckets: Sequence[Buckets], in_place_bytes: float | None) -> float:
        """The most that waits at its parameters until a bucket is full."""
        ...

    def shard(self, replicas: int, rank: int) -> Extent: ...
    def owned(self, replicas: int, rank: int) -> float:
        """Elements of the tensors of a shard."""
        ...

    def gathered(self, replicas: int, held: Sequence[int]) -> float:
        """Under zero(3), of a rank that holds these shards: what it has of the other ones.

        The root unit, one that computes, and the next.
        """
        ...

    def factors(self, rank: int) -> Factors: ...
    def servers(self, count: int) -> float:
        """The largest slice of so many servers."""
        ...


@dataclass(frozen=True)
class EvenSizes:
    """So many numbers in layers of about `layer` numbers."""

    parameters: float
    width: float = 4  # bytes of an element
    layer: float = 0.0  # numbers of the largest layer
    pair: float = 0.0  # of two layers, one after the other: zero(3) gathers one beside the other
    largest_tensor: float = 0.0

    header = 0.0
    tensors = 0

    @property
    def elements(self) -> float:
        return self.parameters

    @property
    def trained(self) -> float:
        return self.parameters

    def buckets(self, num_bytes: float, first_bytes: float | None = None) -> list[Buckets]:
        wanted = num_bytes / self.width
        first = min(self.parameters, (first_bytes or num_bytes) / self.width)
        found = [Buckets(1, first, first)]
        full, rest = divmod(self.parameters - first, wanted)
        if full:
            found.append(Buckets(int(full), wanted, wanted))
        if rest > 0.5:
            found.append(Buckets(1, rest, rest))
        return found

    def in_place(self, num_bytes: float) -> float:
        """All, where an eighth of a layer is as large."""
        tensor_bytes = (self.layer or self.parameters) * self.width / 8
        return self.parameters if tensor_bytes >= num_bytes else 0.0

    def largest_wait(self, buckets: Sequence[Buckets], in_place_bytes: float | None) -> float:
        if in_place_bytes is not None and self.in_place(in_place_bytes):
            return 0.0
        return max(bucket.waiting for bucket in buckets)

    def shard(self, replicas: int, rank: int) -> Extent:
        return Extent(0.0, self.parameters / replicas)

    def owned(self, replicas: int, rank: int) -> float:
        return self.parameters / replicas

    def gathered(self, replicas: int, held: Sequence[int]) -> float:
        return min(self.pair, self.parameters) * (1 - len(held) / replicas)

    def factors(self, rank: int) -> Factors:
        """Square matrices: 8 of them in a layer."""
        layer = self.layer or self.parameters
        side = math.sqrt(layer / 8)
        share = min(1.0, 2 * rank / max(1.0, side))
        return Factors(share / 2 * self.parameters, share / 2 * self.parameters, 0.0)

    def servers(self, count: int) -> float:
        return self.parameters / count


@dataclass(frozen=True, eq=False)
class TensorSizes:
    """The trained tensors of a worker's model, in order."""

    shapes: tuple[tuple[int, ...], ...]
    units: tuple[tuple[int, ...], ...] = ()  # tensors that zero(3) gathers together; root first
    width: int = 4

    @property
    def tensors(self) -> int:
        return len(self.shapes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def trained(self) -> float:
        return sum(self.sizes)

    @property
    def largest_tensor(self) -> float:
        return max(self.sizes)

    @property
    def header(self) -> float:
        return self._round_up(1 + len(self.shapes)) if self.width >= 4 else 0

    @cached_property
    def starts(self) -> tuple[int, ...]:
        starts = []
        at = int(self.header)
        for size in self.sizes:
            starts.append(at)
            at = self._round_up(at + size)
        return tuple(starts)

    @property
    def elements(self) -> float:
        return self._round_up(self.starts[-1] + self.sizes[-1])

    def _round_up(self, elements: int) -> int:
        align = max(1, ALIGN_BYTES // self.width)
        return -(-elements // align) * align

    def bucket_runs(
        self, num_bytes: float, first_bytes: float | None = None, within: Extent | None = None
    ) -> list[Extent]:
        wanted = max(1, (first_bytes or num_bytes) // self.width)
        begin, stop = within or (0, self.elements)
        runs = []
        for start in reversed(self.starts[1:]):
            if begin < start < stop and stop - start >= wanted:
                runs.append(Extent(start, stop))
                stop = start
                wanted = max(1, num_bytes // self.width)
        return [*runs, Extent(begin, stop)] if begin < stop else runs

    def inside(self, run: Extent) -> list[int]:
        """The tensors that begin in a run."""
        return [i for i, start in enumerate(self.starts) if run.start <= start < run.stop]

    def waiting(self, run: Extent, in_place_bytes: float | None = None) -> int:
        most = math.inf if in_place_bytes is None else in_place_bytes
        sizes = (self.sizes[i] for i in self.inside(run))
        return sum(size for size in sizes if size * self.width < most)

    def buckets(self, num_bytes: float, first_bytes: float | None = None) -> list[Buckets]:
        runs = self.bucket_runs(num_bytes, first_bytes)
        return [Buckets(1, run.size, self.waiting(run)) for run in runs]

    def in_place(self, num_bytes: float) -> float:
        return sum(size for size in self.sizes if size * self.width >= num_bytes)

    def largest_wait(self, buckets: Sequence[Buckets], in_place_bytes: float | None) -> float:
        stop = self.elements
        most = 0.0
        for bucket in buckets:
            run = Extent(stop - bucket.elements, stop)
            most = max(most, self.waiting(run, in_place_bytes))
            stop = run.start
        return most

    def shards(self, replicas: int) -> list[Extent]:
        boundaries = [self.header, *self.starts[1:], self.elements]
        edges = shard_edges(boundaries, replicas)
        return [Extent(a, b) for a, b in itertools.pairwise(edges)]

    def shard(self, replicas: int, rank: int) -> Extent:
        return self.shards(replicas)[rank]

    def owned(self, replicas: int, rank: int) -> float:
        return self.waiting(self.shard(replicas, rank))

    def gathered(self, replicas: int, held: Sequence[int]) -> float:
        here = {i for rank in held for i in self.inside(self.shard(replicas, rank))}
        elements = []
        for unit in self.units or (tuple(range(len(self.shapes))),):
            others = [i for i in unit if i not in here]
            elements.append(sum(self._round_up(self.sizes[i]) for i in others))
        root, *blocks = elements
        pairs = [a + b for a, b in itertools.pairwise([0, *blocks, 0])]
        return root + max(pairs, default=0)

    @property
    def first_units(self) -> float:
        """Elements of the root unit and of the first block, which zero(3) gathers once.

        The backward of a first layer needs its input alone.
        """
        units = self.units or (tuple(range(len(self.shapes))),)
        kept = set(units[:2])
        return sum(self._round_up(self.sizes[i]) for unit in kept for i in unit)

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
        equal = (self.elements - self.header) / count
        allowed = {self.header, self.elements, *map(float, self.starts)}
        for shape, start, size in zip(self.shapes, self.starts, self.sizes, strict=True):
            if size > equal:
                allowed.update(range(start, start + size, math.prod(shape[1:])))
        edges = [self.header]
        for k in range(1, count):
            target = self.header + equal * k
            edges.append(max(edges[-1], min(allowed, key=lambda edge: abs(edge - target))))
        edges.append(self.elements)
        return max(b - a for a, b in itertools.pairwise(edges))
