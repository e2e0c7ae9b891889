"""Sums over all replicas in compressed form, with what compression loses kept for later.

Error feedback: what a replica could not send of a step (its residual) is added to what it sends
in the next. Nothing is lost, only delayed. All replicas end with the same bits, since all unpack
the same bytes.

A sum goes in stages, written as a generator: what it yields is under way while other things run.
Tensors that a later stage does not need are deleted before the generator yields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.comm.compress import Compressor, PowerSgd, TopK, make_compressor
from shoal.comm.group import Group, Op
from shoal.comm.transport.transport import Work
from shoal.errors import CheckpointError
from shoal.replica.flat_params import FlatLayout, FlatParams
from shoal.replica.split.shard import ReplicaShard


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """A residual has at least 24 bits of precision, whatever the parameters have."""
    return torch.promote_types(dtype, torch.float32)


def new_residual(flat: FlatParams, numel: int) -> Tensor:
    return torch.zeros(numel, dtype=residual_dtype(flat.dtype), device=flat.device)


def take_residual(tensors: dict[str, Tensor], residual: Tensor, rank: int, size: int) -> None:
    """Load the saved residual of one of `size` workers.

    If another number of workers has saved, each takes an equal fraction of the sum.
    """
    saved = _residuals(tensors)
    of_rank = tensors.get(f"worker/{rank}/residual")
    if of_rank is not None and len(saved) == size:
        residual.copy_(of_rank)
    else:
        total = torch.stack(saved).sum(0) if saved else torch.zeros(())
        residual.copy_(total / size)


def check_residuals(tensors: dict[str, Tensor], residual: Tensor) -> None:
    """Refuse what `take_residual` could not load."""
    for tensor in _residuals(tensors):
        check_size(tensor, residual)


def _residuals(tensors: dict[str, Tensor]) -> list[Tensor]:
    return [t for name, t in tensors.items() if name.endswith("/residual")]


def check_size(saved: Tensor, expected: Tensor) -> None:
    if not saved.is_floating_point() or saved.shape != (expected.numel(),):
        raise CheckpointError(
            "the checkpoint's state of the strategy is damaged, or of another model: it has "
            f"{tuple(saved.shape)} of {saved.dtype}, and this one needs {expected.numel()} numbers"
        )


def check_number(saved: Tensor) -> None:
    """Refuse what is not one count."""
    if saved.numel() != 1 or saved.dtype != torch.int64 or int(saved) < 0:
        raise CheckpointError(
            "the checkpoint's state of the strategy is damaged: a count is "
            f"{tuple(saved.shape)} of {saved.dtype}"
        )


def is_alike(saved: Tensor, expected: Tensor) -> bool:
    return saved.shape == expected.shape and saved.dtype == expected.dtype


def synchronize_copies(
    flat: FlatParams, buffer: Tensor, copies: ReplicaShard | None, start: int = 0
) -> None:
    """Make equal what several workers of a replica have of the same parameters.

    `buffer` has all of them, and stands for the flat one from `start` on.
    """
    if copies is not None:
        views = {p: flat.view(i, buffer, start) for i, p in enumerate(flat.params)}
        copies.synchronize_copies(views)


def unused_positions(flat: FlatParams, copies: ReplicaShard | None) -> Tensor:
    """Positions of the buffer between parameters, and of copies that another worker decides."""
    positions = [flat.gaps()]
    for param, p in zip(flat.ranges, flat.params, strict=True):
        if copies is not None and copies.is_duplicate(p):
            positions.append(torch.arange(param.start, param.stop, device=flat.device))
    return torch.cat(positions)


class Sum:
    """Adds up slices of a flat buffer over all replicas. All ranks call it in the same order."""

    num_stages: ClassVar[int] = 1  # at most; messages go out in each
    group: Group
    under_way: dict[int, tuple[Iterator[Work], Work]]  # by start of the slice: its present stage
    on_stage: Callable[[], None] | None = None  # called when a stage has begun, to look at memory

    def __init__(self, group: Group):
        self.group = group
        self.under_way = {}

    def start(self, x: Tensor, at: slice) -> None:
        """Begin to replace `x`, which lies at `at` of the buffer, by (about) the sum of all."""
        self._begin_stage(at.start, self.stages(x, at))

    def finish(self) -> None:
        """Finish all sums, side by side."""
        while self.under_way:
            self.advance(next(iter(self.under_way)))

    def finish_one(self, at: slice) -> None:
        while at.start in self.under_way:
            self.advance(at.start)

    def advance(self, start: int) -> None:
        """Wait for the present stage of a sum, and begin the next one if there is one."""
        stages, work = self.under_way.pop(start)
        work.wait()
        self._begin_stage(start, stages)

    def _begin_stage(self, start: int, stages: Iterator[Work]) -> None:
        work = next(stages, None)
        if work is not None:
            self.under_way[start] = stages, work
        if self.on_stage is not None:
            self.on_stage()

    def stages(self, x: Tensor, at: slice) -> Iterator[Work]:
        """Replace `x` stage by stage; yields what is under way."""
        yield self.group.all_reduce(x)

    def clear_unused(self) -> None:
        """What was lost between parameters is of no use, and no checkpoint has it."""

    def state(self) -> dict[str, Tensor]:
        """What has to be saved of all workers, at rank 0."""
        return {}

    def check_state(self, tensors: dict[str, Tensor]) -> None:
        """Refuse what `load_state` could not take."""

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Each worker takes its own back; another number of workers splits the sum equally."""


class CompressedSum(Sum):
    """Sums of what is left of numbers when they are packed."""

    memory_column: ClassVar[str] = "residuals"
    num_stages = 2

    def __init__(self, flat: FlatParams, group: Group, unused: Tensor):
        """`unused`: positions of the buffer between parameters, and of copies."""
        super().__init__(group)
        self.residual = new_residual(flat, flat.size)
        self.unused = unused

    def clear_unused(self) -> None:
        self.residual[self.unused] = 0.0

    def state(self) -> dict[str, Tensor]:
        residuals = self.residual.new_empty(self.group.size, self.residual.numel())
        is_root = self.group.rank == 0
        self.group.gather(residuals if is_root else None, self.residual).wait()
        return {f"worker/{r}/residual": row for r, row in enumerate(residuals)} if is_root else {}

    def check_state(self, tensors: dict[str, Tensor]) -> None:
        check_residuals(tensors, self.residual)

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        take_residual(tensors, self.residual, self.group.rank, self.group.size)


class FactoredSum(CompressedSum):
    """PowerSGD: all-reduces of P and of Q. The projections of all replicas are added up, P is made
    orthogonal, and so on.

    A replica keeps what its own matrices have outside of the space that P spans.
    """

    def __init__(
        self, flat: FlatParams, group: Group, factors: dict[int, PowerSgd], unused: Tensor
    ):
        super().__init__(flat, group, unused)
        self.factors = factors

    def stages(self, x: Tensor, at: slice) -> Iterator[Work]:
        factors = self.factors[at.start]
        wanted = x + self.residual[at]
        left = factors.project(wanted)
        rest = left[factors.num_left :].clone()
        yield self.group.all_reduce(left)
        factors.orthogonalise(left)
        right = factors.correlate(wanted, left)
        sent = torch.cat([left[: factors.num_left], rest])
        torch.sub(wanted, factors.expand(sent, right), out=self.residual[at])
        del sent, wanted, rest
        if factors.num_right:
            yield self.group.all_reduce(right)
        factors.continue_from(right)
        x.copy_(factors.expand(left, right))

    def state(self) -> dict[str, Tensor]:
        bases = {f"basis/{start}": f.basis for start, f in self.factors.items() if f.num_right}
        return {**super().state(), **bases}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Bases of other buckets are of no use: the iteration then starts again."""
        super().load_state(tensors)
        for start, factors in self.factors.items():
            basis = tensors.get(f"basis/{start}")
            if basis is not None and is_alike(basis, factors.basis):
                factors.basis = basis.to(self.residual.device)


MOST_KEPT = 4  # times as many elements of a sum as each replica sends


class ShardedSum(CompressedSum):
    """Every rank owns a shard of each slice and packs its sum, perhaps in another way.

    all_to_all    packed shards to their owners
    all_gather    packed sums from their owners: 2·(p-1)/p of the packed size, as a ring sends

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
        super().__init__(flat, group, unused)
        self.compressor = compressor
        self.sum_compressor = sum_compressor(compressor, group.size)
        self.owned = {at.start: owned_shard(at, group.rank, group.size) for at in slices}
        self.owed = {start: new_residual(flat, s.stop - s.start) for start, s in self.owned.items()}
        self._unused = {
            start: unused[(unused >= s.start) & (unused < s.stop)] - s.start
            for start, s in self.owned.items()
        }

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


def make_compressed_sum(
    text: str,
    flat: FlatParams,
    group: Group,
    slices: Sequence[slice],
    copies: ReplicaShard | None = None,
) -> CompressedSum:
    """What `compress="…"` asks for, for these slices of the buffer."""
    unused = unused_positions(flat, copies)
    compressors = _compressors(text, flat, slices)
    factors = {start: c for start, c in compressors.items() if isinstance(c, PowerSgd)}
    first = next(iter(compressors.values()))
    if factors:
        return FactoredSum(flat, group, factors, unused)
    return ShardedSum(flat, group, slices, first, unused)


def _compressors(text: str, flat: FlatLayout, slices: Sequence[slice]) -> dict[int, Compressor]:
    """For each slice, which knows where the parameters lie in it."""
    made = {}
    for at in slices:
        shapes = [
            (param.start - at.start, tuple(p.shape))
            for param, p in zip(flat.ranges, flat.params, strict=True)
            if at.start <= param.start < at.stop
        ]
        made[at.start] = make_compressor(text, shapes, at.stop - at.start)
    return made
