"""Sums over all replicas in compressed form, with what compression loses kept for later.

Error feedback: what a replica could not send of a step (its residual) is added to what it sends
in the next. Nothing is lost, only late; and everybody ends with the same bits, since everybody
unpacks the same bytes.

    Sharded     fp16 bf16 int8    shards to their owners, who add them up, pack the sum and send it
                onebit topk       to all: 2·(p-1)/p of the packed size, as a ring all-reduce
    Factored    powersgd          all-reduces of P and of Q

A sum goes in stages, written as a generator: what it yields is under way while other things run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.comm.group import Group, Op
from shoal.compress.catalog import make_compressor
from shoal.compress.compressor import Compressor
from shoal.compress.powersgd import PowerSgd
from shoal.compress.topk import TopK
from shoal.errors import BadInput, CheckpointError
from shoal.replica.flat_params import FlatParams
from shoal.strategy.base import SyncTerm
from shoal.sync.base import Copies, StepSettings
from shoal.transport.transport import Work

MOST_KEPT = 4  # times as many elements of a sum as each replica sends


def synchronize_copies(flat: FlatParams, buffer: Tensor, copies: Copies | None) -> None:
    if copies is not None:
        copies.synchronize_copies({p: flat.view(i, buffer, 0) for i, p in enumerate(flat.params)})


class Staged:
    """Stages of which the first is under way."""

    def __init__(self, stages: Iterator[Work]):
        self._stages = stages
        self._work = next(stages, None)

    def advance(self) -> bool:
        """Finish the present stage and start the next; False when there is none."""
        if self._work is not None:
            self._work.wait()
            self._work = next(self._stages, None)
        return self._work is not None


def complete(under_way: Sequence[Staged]) -> None:
    """Finish them all, side by side."""
    while under_way:
        under_way = [staged for staged in under_way if staged.advance()]


class Exchange(Protocol):
    """Adds up slices of a flat buffer over all replicas. All ranks call it in the same order."""

    group: Group
    residual: Tensor
    unused: Tensor  # places of the buffer between parameters, and of copies
    feedback: bool = True  # False: what compression loses is lost, to see what that does

    def sum(self, x: Tensor, at: slice) -> Iterator[Work]:
        """Replace `x`, which lies at `at` of the buffer, by (about) the sum of everybody's."""
        ...

    def clear_unused(self) -> None:
        """What was lost there is of no use, and no checkpoint has it."""
        self.residual[self.unused] = 0.0

    def state(self) -> dict[str, Tensor]:
        """What has to be saved of all workers, at rank 0."""
        residuals = self.residual.new_empty(self.group.size, self.residual.numel())
        is_root = self.group.rank == 0
        self.group.gather(residuals if is_root else None, self.residual).wait()
        return {f"worker/{r}/residual": row for r, row in enumerate(residuals)} if is_root else {}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Everybody takes his own back; another number of workers shares the sum equally."""
        take_residual(tensors, self.residual, self.group.rank, self.group.size)


class Sharded(Exchange):
    """Every rank owns a shard of each slice and packs its sum, perhaps in another way (`answers`).

    What the second packing loses is kept by the owner (`owed`) and added to its next sum.
    """

    def __init__(
        self,
        flat: FlatParams,
        group: Group,
        slices: Sequence[slice],
        compressor: Compressor,
        answers: Compressor,
        unused: Tensor,
    ):
        self.group = group
        self.compressor = compressor
        self.answers = answers
        self.residual = _zeros(flat, flat.size)
        self.unused = unused
        self._places = {at.start: self._place(at) for at in slices}
        self.owed = {start: _zeros(flat, p.stop - p.start) for start, p in self._places.items()}
        self._unused = {start: _inside(unused, p) for start, p in self._places.items()}

    def clear_unused(self) -> None:
        super().clear_unused()
        for start, places in self._unused.items():
            self.owed[start][places] = 0.0

    def sum(self, x: Tensor, at: slice) -> Iterator[Work]:
        size = self.group.size
        shard = _shard(x.numel(), self.group.size)
        wanted = x + self.residual[at]
        rows = F.pad(wanted, (0, size * shard - x.numel())).view(size, shard)
        packed = torch.stack([self.compressor.pack(row) for row in rows])
        if self.feedback:
            torch.sub(wanted, self._join(self.compressor, packed, x), out=self.residual[at])
        arrived = torch.empty_like(packed)
        yield self.group.all_to_all(arrived, packed)
        owed = self.owed[at.start]
        total = F.pad(owed, (0, shard - owed.numel()))
        for message in arrived:
            total += self.compressor.unpack(message, shard)
        answer = self.answers.pack(total)
        if self.feedback:
            total -= self.answers.unpack(answer, shard)
            owed.copy_(total[: owed.numel()])
        sums = answer.new_empty(size, answer.numel())
        yield self.group.all_gather(sums, answer)
        x.copy_(self._join(self.answers, sums, x))

    def state(self) -> dict[str, Tensor]:
        whole = torch.zeros_like(self.residual)
        for start, place in self._places.items():
            whole[place] = self.owed[start]
        self.group.reduce(whole, op=Op.SUM).wait()
        saved = super().state()
        return {**saved, "owed": whole} if self.group.rank == 0 else {}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        super().load_state(tensors)
        if "owed" not in tensors:
            return
        check_size(tensors["owed"], self.residual)
        for start, place in self._places.items():
            self.owed[start].copy_(tensors["owed"][place])

    def _join(self, compressor: Compressor, packed: Tensor, like: Tensor) -> Tensor:
        """The shards that the rows of `packed` stand for, one after the other."""
        shard = _shard(like.numel(), self.group.size)
        return torch.cat([compressor.unpack(row, shard) for row in packed])[: like.numel()]

    def _place(self, at: slice) -> slice:
        """Where this rank's shard of a slice lies in the buffer."""
        shard = _shard(at.stop - at.start, self.group.size)
        start = min(at.stop, at.start + self.group.rank * shard)
        return slice(start, min(at.stop, start + shard))


class Factored(Exchange):
    """PowerSGD: the projections of all replicas are added up, P is made orthogonal, and so on.

    A replica keeps what its own matrices have outside of the space that P spans.
    """

    def __init__(
        self,
        flat: FlatParams,
        group: Group,
        factors: dict[int, PowerSgd],
        unused: Tensor,
    ):
        self.group = group
        self.factors = factors
        self.residual = _zeros(flat, flat.size)
        self.unused = unused

    def sum(self, x: Tensor, at: slice) -> Iterator[Work]:
        factors = self.factors[at.start]
        wanted = x + self.residual[at]
        left = factors.project(wanted)
        rest = left[factors.num_left :].clone()
        yield self.group.all_reduce(left)
        factors.orthogonalise(left)
        right = factors.correlate(wanted, left)
        if self.feedback:
            own = torch.cat([left[: factors.num_left], rest])
            torch.sub(wanted, factors.expand(own, right), out=self.residual[at])
        if factors.num_right:
            yield self.group.all_reduce(right)
        factors.continue_from(right)
        x.copy_(factors.expand(left, right))

    def state(self) -> dict[str, Tensor]:
        bases = {f"basis/{start}": f.basis for start, f in self.factors.items() if f.num_right}
        return {**super().state(), **bases}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Bases of other buckets are of no use: the iteration then starts anew."""
        super().load_state(tensors)
        for start, factors in self.factors.items():
            basis = tensors.get(f"basis/{start}")
            if basis is not None and basis.shape == factors.basis.shape:
                factors.basis = basis.to(self.residual.device)


def make_exchange(
    text: str,
    flat: FlatParams,
    group: Group,
    slices: Sequence[slice],
    copies: Copies | None = None,
) -> Exchange:
    """What `compress="…"` asks for, for these slices of the buffer."""
    unused = unused_places(flat, copies)
    made = {at.start: make_compressor(text, *_layout(flat, at)) for at in slices}
    factors = {start: c for start, c in made.items() if isinstance(c, PowerSgd)}
    first = next(iter(made.values()))
    if factors:
        return Factored(flat, group, factors, unused)
    return Sharded(flat, group, slices, first, _answers(first, group.size), unused)


def _answers(compressor: Compressor, replicas: int) -> Compressor:
    """How sums are packed.

    The largest elements of several replicas are mostly different ones. Sums over up to four of
    them are sent whole, those over more in part, so that bytes do not grow with their number.
    """
    if isinstance(compressor, TopK):
        return TopK(min(1.0, compressor.fraction * min(replicas, MOST_KEPT)))
    return compressor


def refuse_scaled(term: SyncTerm, options: StepSettings) -> None:
    """Compressed gradients must keep their scale between steps."""
    if options.precision == "fp16":
        raise BadInput(
            f'{term} and precision="fp16" exclude each other: the scale of such gradients changes '
            'between steps, and so would what is left to send; take precision="bf16"'
        )


def take_residual(tensors: dict[str, Tensor], residual: Tensor, rank: int, size: int) -> None:
    """The saved residual of one of `size` workers; its share of them all if others have saved."""
    found = [t for name, t in tensors.items() if name.endswith("/residual")]
    for tensor in found:
        check_size(tensor, residual)
    own = tensors.get(f"worker/{rank}/residual")
    if own is not None and len(found) == size:
        residual.copy_(own)
    else:
        total = torch.stack(found).sum(0) if found else torch.zeros(())
        residual.copy_(total / size)


def check_size(saved: Tensor, own: Tensor) -> None:
    if saved.numel() != own.numel():
        raise CheckpointError(
            "the checkpoint's state of the strategy is of another model: it has "
            f"{saved.numel()} elements, and this one needs {own.numel()}"
        )


def _layout(flat: FlatParams, at: slice) -> tuple[list[tuple[int, Sequence[int]]], int]:
    """Where the parameters of a slice lie in it, and how long it is."""
    shapes: list[tuple[int, Sequence[int]]] = [
        (piece.start - at.start, tuple(p.shape))
        for piece, p in zip(flat.ranges, flat.params, strict=True)
        if at.start <= piece.start < at.stop
    ]
    return shapes, at.stop - at.start


def _zeros(flat: FlatParams, numel: int) -> Tensor:
    """What is carried over has at least 24 bits of precision, whatever the parameters have."""
    dtype = torch.promote_types(flat.dtype, torch.float32)
    return torch.zeros(numel, dtype=dtype, device=flat.device)


def unused_places(flat: FlatParams, copies: Copies | None) -> Tensor:
    """Places of the buffer between parameters, and of what another worker has the say about."""
    found = [flat.gaps()]
    for piece, p in zip(flat.ranges, flat.params, strict=True):
        if copies is not None and copies.is_duplicate(p):
            found.append(torch.arange(piece.start, piece.stop, device=flat.device))
    return torch.cat(found)


def _inside(places: Tensor, where: slice) -> Tensor:
    """Those of the places that lie in a slice, counted from its start."""
    is_inside = (places >= where.start) & (places < where.stop)
    found: Tensor = places[is_inside] - where.start
    return found


def _shard(numel: int, size: int) -> int:
    return -(-numel // size)
