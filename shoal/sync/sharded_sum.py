"""Compressed sums by shards: each rank adds up a shard of every slice and packs the sum.

all_to_all    packed shards to their owners
all_gather    packed sums from their owners
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.comm.group import Group, Op
from shoal.compress.catalog import TopK
from shoal.compress.compressor import Compressor
from shoal.replica.flat_params import FlatParams
from shoal.sync.compressed_sum import CompressedSum, SliceMemory
from shoal.sync.memory import ModelSizes
from shoal.sync.residuals import (
    INDEX_BYTES,
    check_size,
    new_residual,
    positions_in,
    residual_dtype,
)
from shoal.transport.transport import Work

MOST_KEPT = 4  # times as many elements of a sum as each replica sends


class ShardedSum(CompressedSum):
    """Every rank owns a shard of each slice and packs its sum, perhaps in another way.

    What the second packing loses is kept by the owner (`owed`) and added to its next sum.
    """

    def __init__(
        self,
        flat: FlatParams,
        group: Group,
        slices: Sequence[slice],
        compressor: Compressor,
        unused: Tensor,
    ):
        self.group = group
        self.compressor = compressor
        self.sum_compressor = sum_compressor(compressor, group.size)
        self.under_way = []
        self.residual = new_residual(flat, flat.size)
        self.unused = unused
        self.owned = {at.start: owned_shard(at, group.rank, group.size) for at in slices}
        self.owed = {start: new_residual(flat, s.stop - s.start) for start, s in self.owned.items()}
        self._unused = {start: positions_in(unused, s) for start, s in self.owned.items()}

    def clear_unused(self) -> None:
        super().clear_unused()
        for start, positions in self._unused.items():
            self.owed[start][positions] = 0.0

    def stages(self, x: Tensor, at: slice) -> Iterator[Work]:
        packed = self._pack(x, at)
        arrived = torch.empty_like(packed)
        yield self.group.all_to_all(arrived, packed)
        answer = self._pack_sum(arrived, at)
        del packed, arrived
        sums = answer.new_empty(self.group.size, answer.numel())
        yield self.group.all_gather(sums, answer)
        x.copy_(self._join(self.sum_compressor, sums, x))

    def _pack(self, x: Tensor, at: slice) -> Tensor:
        """A row for each rank: its shard of `x` and of what is left to send."""
        size = self.group.size
        shard = shard_size(x.numel(), size)
        wanted = x + self.residual[at]
        rows = F.pad(wanted, (0, size * shard - x.numel())).view(size, shard)
        packed = torch.stack([self.compressor.pack(row) for row in rows])
        if self.feedback:
            torch.sub(wanted, self._join(self.compressor, packed, x), out=self.residual[at])
        return packed

    def _pack_sum(self, arrived: Tensor, at: slice) -> Tensor:
        """The sum of this rank's shard over all ranks, packed."""
        shard = shard_size(at.stop - at.start, self.group.size)
        owed = self.owed[at.start]
        total = F.pad(owed, (0, shard - owed.numel()))
        for message in arrived:
            total += self.compressor.unpack(message, shard)
        answer = self.sum_compressor.pack(total)
        if self.feedback:
            total -= self.sum_compressor.unpack(answer, shard)
            owed.copy_(total[: owed.numel()])
        return answer

    def state(self) -> dict[str, Tensor]:
        all_owed = torch.zeros_like(self.residual)
        for start, owned in self.owned.items():
            all_owed[owned] = self.owed[start]
        self.group.reduce(all_owed, op=Op.SUM).wait()
        saved = super().state()
        return {**saved, "owed": all_owed} if self.group.rank == 0 else {}

    def check_state(self, tensors: dict[str, Tensor]) -> None:
        super().check_state(tensors)
        if "owed" in tensors:
            check_size(tensors["owed"], self.residual)

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        super().load_state(tensors)
        if "owed" not in tensors:
            return
        for start, owned in self.owned.items():
            self.owed[start].copy_(tensors["owed"][owned])

    def _join(self, compressor: Compressor, packed: Tensor, like: Tensor) -> Tensor:
        """The shards that the rows of `packed` stand for, one after the other."""
        shard = shard_size(like.numel(), self.group.size)
        return torch.cat([compressor.unpack(row, shard) for row in packed])[: like.numel()]


def owned_shard(at: slice, rank: int, replicas: int) -> slice:
    """Where the shard of a slice lies that this rank adds up."""
    shard = shard_size(at.stop - at.start, replicas)
    start = min(at.stop, at.start + rank * shard)
    return slice(start, min(at.stop, start + shard))


def sum_compressor(compressor: Compressor, replicas: int) -> Compressor:
    """How sums are packed.

    The largest elements of several replicas are mostly different ones. Sums over up to four of
    them are sent completely, those over more in part, so that bytes do not grow with their number.
    """
    if isinstance(compressor, TopK):
        return TopK(min(1.0, compressor.fraction * min(replicas, MOST_KEPT)))
    return compressor


def shard_size(numel: int, size: int) -> int:
    return -(-numel // size)


def sharded_memory(
    sizes: ModelSizes, at: slice, compressor: Compressor, rank: int, replicas: int
) -> SliceMemory:
    """Packed shards leave and arrive; then the packed sums of all shards arrive."""
    owned = owned_shard(at, rank, replicas)
    shard = shard_size(at.stop - at.start, replicas)
    owed = (owned.stop - owned.start) * residual_dtype(sizes.flat.dtype).itemsize
    packed_sum = sum_compressor(compressor, replicas).num_bytes(shard)
    return SliceMemory(
        kept=owed + INDEX_BYTES * sizes.unused_in(owned),
        first=2 * replicas * compressor.num_bytes(shard),
        second=(replicas + 1) * packed_sum,
    )
