"""Where tensors lie in one flat buffer, and how it is cut into buckets and shards.

    [ header | p0 .. | p1 ...... | p2 . | p3 ........ ]

Arithmetic without torch, in elements: the runtime lays parameters out by it
(`replica/flat_params.py`), and schedules of steps are made of it (`steps/worker_model.py`).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, TypeVar


class ShardTransfer(NamedTuple):
    """A parameter that one rank sends to another."""

    source: int
    target: int
    param: int


def held_shards(rank: int, ranks: int, copies: int) -> list[int]:
    """The shards that a rank holds, its own first; all of them where there are few ranks."""
    return [(rank - distance) % ranks for distance in range(min(copies + 1, ranks))]


def holders(shard: int, ranks: int, copies: int) -> list[int]:
    """The ranks that hold a shard, its owner first."""
    return [(shard + distance) % ranks for distance in range(min(copies + 1, ranks))]


def surviving_holders(
    owners: Sequence[int], ranks: int, copies: int, earlier_ranks: Sequence[int | None]
) -> list[list[int]]:
    """For each parameter the present ranks that have held it; `owners` are its earlier shards.

    `earlier_ranks` are those of the present ranks in the group before, of `ranks` ranks; None for
    a rank that was not in it.
    """
    now = {earlier: rank for rank, earlier in enumerate(earlier_ranks) if earlier is not None}
    of_shard = [
        sorted(now[rank] for rank in holders(shard, ranks, copies) if rank in now)
        for shard in range(ranks)
    ]
    return [of_shard[owner] for owner in owners]


def shard_transfers(
    held_by: Sequence[Sequence[int]], owners: Sequence[int], ranks: int, copies: int
) -> list[ShardTransfer]:
    """What has to be sent so that each parameter is where `owners` says, and on the copies."""
    transfers = []
    for param, (sources, owner) in enumerate(zip(held_by, owners, strict=True)):
        for target in holders(owner, ranks, copies):
            if target not in sources:
                source = sources[target % len(sources)]
                transfers.append(ShardTransfer(source, target, param))
    return transfers


ON_THE_WAY = 2


class FilledBucket(NamedTuple):
    """Elements of a bucket, in the order in which backward fills them."""

    size: float
    waits: float  # at the parameters, when it is full
    is_own: bool  # its memory is kept until the update, once in a step


def must_settle(sizes: Sequence[float], size: float, room: float) -> bool:
    """Whether buckets of these sizes leave a further one no room, of so many elements in all."""
    return len(sizes) >= ON_THE_WAY and sum(sizes) + size > room


def times_settled(buckets: Sequence[float], room: float) -> int:
    """How often a backward waits for a bucket that is on its way, since the next has no room."""
    on_the_way: list[float] = []
    times = 0
    for size in buckets:
        times += must_settle(on_the_way, size, room)
        while must_settle(on_the_way, size, room):
            on_the_way.pop(0)
        on_the_way.append(size)
    return times


def most_gradients(
    buckets: Sequence[FilledBucket], passes: int, room: float, offload: bool = False
) -> float:
    """Elements of kept and lent memory and of waiting gradients, at the worst moment of a step.

    With `offload` those that are kept go to the host's memory, one bucket at a time.
    """
    most = 0.0
    kept = 0.0
    sizes: list[float] = []  # of buckets on their way
    stays: list[bool] = []  # which of them are kept
    for number in range(passes):
        for size, waits, is_own in buckets:
            most = max(most, kept + sum(sizes) + waits)
            while must_settle(sizes, size, room):
                settled = sizes.pop(0)
                if stays.pop(0):
                    kept = settled if offload else kept + settled
            sizes.append(size)
            stays.append(is_own and (offload or number == 0))
            most = max(most, kept + sum(sizes) + waits)
    return most


Position = TypeVar("Position", int, float)

CAST_WIDTH = 2  # bytes of a number that zero(3) gathers in the dtype of autocast
_SLICE_ALIGN = 16  # elements
ALIGN_BYTES = 64  # a parameter starts on a cache line, in every process alike
DEFAULT_BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20  # of the bucket that is full first, so that communication starts early
LARGE_BYTES = 1 << 20  # a gradient of this size is worth a call of its own, and no copy
SHARED_BYTES = 8 << 20  # of weights that workers of a host share; for less it does not pay
PUSH_BUCKET_BYTES = 4 << 20  # of a push to parameter servers
MIXING_CHUNK_BYTES = 4 << 20  # of gossip's weights: added up while the next is under way
_SMALLEST_BUCKET_BYTES = 1 << 20  # of zero


def shard_edges(boundaries: Sequence[Position], shards: int) -> list[Position]:
    """The edges of consecutive shards, each at the boundary nearest to an equal division.

    Boundaries are in order; the first and the last one are edges.
    """
    first = boundaries[0]
    span = boundaries[-1] - first
    edges = [first]
    for k in range(1, shards):
        target = first + span * k / shards
        following = bisect.bisect_left(boundaries, target)
        near = boundaries[max(0, following - 1) : following + 1]
        edges.append(max(min(near, key=lambda edge: abs(edge - target)), edges[-1]))
    edges.append(boundaries[-1])
    return edges


class ShapedTensor(Protocol):
    """Where a tensor of this shape starts in the buffer."""

    @property
    def start(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def server_edges(
    tensors: Sequence[ShapedTensor], size: int, servers: int, by_rows: bool
) -> list[int]:
    """Where slices of servers begin and end: as equal as the boundaries of tensors allow.

    With `by_rows`, a tensor larger than an equal slice is split between rows. A slice may be
    empty when there are few tensors.
    """
    first = tensors[0].start
    equal = (size - first) / servers
    allowed = {first, size}
    for tensor in tensors:
        length = math.prod(tensor.shape)
        row = math.prod(tensor.shape[1:])
        allowed.add(tensor.start)
        if by_rows and length > equal and row:
            allowed.update(range(tensor.start, tensor.start + length, row))
    return shard_edges(sorted(allowed), servers)


def sharded_bucket_bytes(buffer_bytes: float, replicas: int) -> int:
    """Buckets of zero are small beside a shard, since they need memory of their own."""
    shard_bytes = int(buffer_bytes // replicas)
    return min(DEFAULT_BUCKET_BYTES, max(_SMALLEST_BUCKET_BYTES, shard_bytes // 16))


def room_elements(bucket_bytes: int, width: int) -> int:
    """What buckets of zero on their way may take together, where there are more than two."""
    return ON_THE_WAY * bucket_bytes // width


def aligned_bytes(elements: int, width: int) -> int:
    """Of a tensor in memory where each starts on a cache line."""
    return -(-elements * width // ALIGN_BYTES) * ALIGN_BYTES


class BufferLayout:
    """Tensors of these sizes, in order; `width` are the bytes of an element.

    The header has the loss and a flag for each tensor, where the dtype keeps a loss precise.
    """

    def __init__(self, sizes: Sequence[int], width: int, header_fits: bool):
        self.sizes = tuple(sizes)
        self.width = width
        self._align = max(1, ALIGN_BYTES // width)
        self.header_size = 1 + len(self.sizes)
        self.offset = self.round_up(self.header_size) if header_fits else 0
        starts = []
        at = self.offset
        for size in self.sizes:
            starts.append(at)
            at = self.round_up(at + size)
        self.starts = tuple(starts)
        self.size = at

    def round_up(self, elements: int) -> int:
        """The next position where a tensor may start."""
        return -(-elements // self._align) * self._align

    def buckets(
        self, num_bytes: float, first_bytes: float | None = None, within: slice | None = None
    ) -> list[slice]:
        """Split the buffer into slices of about `num_bytes`, at tensor boundaries, last first.

        The first bucket is smaller (`first_bytes`), so that communication starts early. `within`
        is a slice to split instead of the entire buffer, such as a shard.
        """
        wanted = max(1, (first_bytes or num_bytes) // self.width)
        begin, stop = (0, self.size) if within is None else (within.start, within.stop)
        buckets = []
        for start in reversed(self.starts[1:]):
            if begin < start < stop and stop - start >= wanted:
                buckets.append(slice(start, stop))
                stop = start
                wanted = max(1, num_bytes // self.width)
        return [*buckets, slice(begin, stop)] if begin < stop else buckets

    def shards(self, n: int) -> list[slice]:
        """`n` consecutive slices, split at tensor boundaries; one may be empty."""
        boundaries = [self.offset, *self.starts[1:], self.size]
        return [slice(a, b) for a, b in itertools.pairwise(shard_edges(boundaries, n))]

    def equal_slices(self, ranks: int) -> list[slice]:
        """Of what is behind the header, wherever a tensor ends; on cache lines."""
        align = _SLICE_ALIGN
        each = -(-(self.size - self.offset) // (ranks * align)) * align
        starts = [min(self.offset + r * each, self.size) for r in range(ranks + 1)]
        return [slice(*pair) for pair in itertools.pairwise(starts)]

    def params_in(self, where: slice) -> list[int]:
        """The indices of the tensors in a slice that is split at their boundaries."""
        return [i for i, start in enumerate(self.starts) if where.start <= start < where.stop]

    def owned_buckets(self, ranks: int, num_bytes: int) -> list[tuple[int, slice]]:
        """Buckets with their owners, last one first; none crosses the border of a shard."""
        first = min(num_bytes, FIRST_BUCKET_BYTES)
        owned: list[tuple[int, slice]] = []
        for rank, shard in reversed(list(enumerate(self.shards(ranks)))):
            buckets = self.buckets(num_bytes, None if owned else first, shard)
            owned += [(rank, bucket) for bucket in buckets]
        return owned

    def waiting(self, where: slice, in_place_bytes: float = math.inf) -> int:
        """Elements of gradients that wait at their parameters until a bucket is full."""
        sizes = (self.sizes[i] for i in self.params_in(where))
        return sum(size for size in sizes if size * self.width < in_place_bytes)

    def in_place(self, num_bytes: float) -> int:
        """Elements of tensors of at least so many bytes."""
        return sum(size for size in self.sizes if size * self.width >= num_bytes)

    def bucketed_gradients(
        self, buckets: Sequence[slice], in_place_bytes: float = math.inf, adds_up: bool = False
    ) -> int:
        """A gradient buffer, and what backward leaves at parameters until a bucket is full."""
        if adds_up:
            return self.size + sum(self.sizes)
        waits = max(self.waiting(bucket, in_place_bytes) for bucket in buckets)
        return self.size + self.in_place(in_place_bytes) + waits

    def update_chunks(self, rank: int, ranks: int) -> list[slice]:
        """What is updated at a time of a shard whose state lies in the host's memory, in order."""
        num_bytes = sharded_bucket_bytes(self.size * self.width, ranks)
        return self.buckets(num_bytes, within=self.shards(ranks)[rank])

    def zero_gradients(
        self,
        stage: int,
        shards: tuple[int, int, int],
        accumulates: bool,
        is_stage: bool,
        offload: bool,
    ) -> float:
        """Elements of gradients under zero; `shards`: the rank, the ranks, the copies."""
        rank, ranks, copies = shards
        bucket_bytes = sharded_bucket_bytes(self.size * self.width, ranks)
        owned = self.owned_buckets(ranks, bucket_bytes)
        waiting = [self.waiting(bucket) for _, bucket in owned]
        if is_stage or (accumulates and stage == 1):
            waiting = [sum(waiting[k:]) for k in range(len(waiting))]
        filled = [
            FilledBucket(bucket.stop - bucket.start, waits, owner == rank)
            for (owner, bucket), waits in zip(owned, waiting, strict=True)
        ]
        passes = 2 if accumulates and not is_stage else 1
        if stage == 1:
            return most_gradients(filled, 1, math.inf)
        room = room_elements(bucket_bytes, self.width)
        most = most_gradients(filled, passes, room, offload)
        slices = self.shards(ranks)
        kept: list[slice] = [slices[shard] for shard in held_shards(rank, ranks, copies)]
        updated = float(sum(one.stop - one.start for one in kept))
        return most if offload else max(updated, most)

    def owners(self, ranks: int) -> list[int]:
        """Of each tensor the shard that it is in."""
        shards = self.shards(ranks)
        return [
            next(r for r, where in enumerate(shards) if where.start <= start < where.stop)
            for start in self.starts
        ]

    def runs(self, members: Sequence[int], owners: Sequence[int]) -> list[list[int]]:
        """Tensors of a unit that lie side by side in one shard: zero(3) gathers them together."""
        runs: list[list[int]] = []
        for i in sorted(members):
            if runs and runs[-1][-1] == i - 1 and owners[i - 1] == owners[i]:
                runs[-1].append(i)
            else:
                runs.append([i])
        return runs

    def gathered_bytes(
        self,
        units: Sequence[Sequence[int]],
        owners: Sequence[int],
        here: Collection[int],
        cast: Collection[int] = (),
    ) -> int:
        """Bytes of gathered tensors under zero(3): root unit, one that computes, the next.

        Those in `cast` are gathered in 16 bits; a run with one of them is here twice at its owner.
        """
        held = []
        for unit in units:
            num_bytes = 0
            for run in self.runs(unit, owners):
                if run[0] not in here or any(i in cast for i in run):
                    num_bytes += sum(self._gathered(i, cast) for i in run)
            held.append(num_bytes)
        root, *blocks = held
        return root + max(a + b for a, b in itertools.pairwise([0, *blocks, 0]))

    def gathered_share(self, cast: Collection[int]) -> float:
        """The bytes that zero(3) gathers, as a share of those without autocast."""
        saved = sum(self.sizes[i] for i in cast) * (1 - CAST_WIDTH / self.width)
        return 1 - saved / sum(self.sizes)

    def _gathered(self, i: int, cast: Collection[int]) -> int:
        return aligned_bytes(self.sizes[i], CAST_WIDTH if i in cast else self.width)
