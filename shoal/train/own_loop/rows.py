"""Rows of the global batch in a loop of the user's own: which ones, and how they are gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.comm.group import Group
from shoal.comm.mesh import Mesh
from shoal.data import AnyBatch, Batch, DictBatch, batch_of
from shoal.data.rows import take
from shoal.data.sampling import BatchSplit, FullDatasetBatch, mix
from shoal.errors import BadInput
from shoal.replica.microbatch_context import fork_rng, seed_generators

if TYPE_CHECKING:
    from shoal.train.own_loop.part import LoopPart


def gather_rows(x: Tensor, group: Group, is_placeholder: bool) -> Tensor:
    """Rows of all ranks, in the order of the global batch; they may have different numbers of them.

        forward     rows of this rank     ─▶ all rows, on every rank           all-gather
        backward    gradient of all rows  ─▶ summed over ranks, own rows of it  reduce-scatter

    The loss of every rank is weighted by its fraction of the global batch, and these sum up to 1:
    the sum over ranks is the gradient of one device. A placeholder counts as no rows.
    """
    if group.size == 1:
        return x
    counts = torch.zeros(group.size, dtype=torch.int64, device=x.device)
    counts[group.rank] = 0 if is_placeholder else len(x)
    group.all_reduce(counts).wait()
    gathered: Tensor = _Gather.apply(x, Rows(group, counts.tolist()))  # type: ignore[no-untyped-call]
    return gathered


class Rows:
    """How many rows each rank has of a tensor."""

    def __init__(self, group: Group, counts: list[int]):
        self.group = group
        self.counts = counts
        self.most = max(1, *counts)
        self.here = counts[group.rank]

    def gather(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        sent = x.to(torch.uint8) if dtype == torch.bool else x
        mine = _padded(sent[: self.here], self.most).contiguous()
        everything = mine.new_empty(self.group.size, *mine.shape)
        self.group.all_gather(everything, mine).wait()
        pieces = [everything[r, :count] for r, count in enumerate(self.counts)]
        return torch.cat(pieces).to(dtype)

    def scatter_sum(self, grad: Tensor, rows_here: int) -> Tensor:
        """The sum over ranks, of which this rank gets its rows; zeros for a placeholder."""
        pieces = [_padded(piece, self.most) for piece in torch.split(grad, self.counts)]
        everything = torch.stack(pieces).contiguous()
        mine = torch.empty_like(everything[0])
        self.group.reduce_scatter(mine, everything).wait()
        return _padded(mine[: self.here], rows_here)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        ctx.rows_here = len(x)
        return rows.gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _ScatterSum.apply(grads[0], ctx.rows, ctx.rows_here), None  # type: ignore[no-untyped-call]


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, rows: Rows, rows_here: int) -> Tensor:
        ctx.rows = rows
        return rows.scatter_sum(grad, rows_here)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(grads[0], ctx.rows), None, None  # type: ignore[no-untyped-call]


def _padded(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, [0, 0] * (x.dim() - 1) + [0, rows - len(x)])


class LoopRows:
    """What is known of the batch that `job.batches` yielded last.

    The cutters of `parts` do what `shoal verify` changes: reversed samples, double precision.
    """

    def __init__(self, mesh: Mesh, seed: int, device: torch.device, parts: Sequence[LoopPart]):
        self.mesh = mesh
        self.seed = seed
        self.device = device
        self.batch: AnyBatch | None = None
        self._parts = parts
        self._number = 0  # of the batch
        self._draws = 0  # calls of `take` in it
        self._group: Group | None = None

    def begin(self, batch: AnyBatch, number: int) -> None:
        self.batch = batch
        self._number = number
        self._draws = 0

    def end(self) -> None:
        self.batch = None

    @property
    def fraction(self) -> float:
        """This worker's fraction of the global batch; equal ones without `job.batches`.

        Workers that have other positions of the same rows divide it.
        """
        copies = self.mesh.cp.size
        if self.batch is None:
            return 1 / (self.mesh.data.size * copies)
        return sum(self.batch.microbatch_sizes) / max(1, self.batch.total) / copies

    @property
    def is_placeholder(self) -> bool:
        """Whether this replica has no rows of the batch, but one that stands in for them."""
        return self.batch is not None and sum(self.batch.microbatch_sizes) == 0

    def moved(self, batch: Any) -> Any:
        """The batch on the device, in the form that it has."""
        part = self.batch
        if isinstance(batch, FullDatasetBatch) or part is None:
            return batch
        content = self._parts[0].step.cutter.place(part.content, part.rows)
        if not isinstance(batch, (Batch, DictBatch)):
            return content
        moved = batch_of(content, part.total, part.microbatch_sizes)
        moved.concurrent = part.concurrent
        return moved

    def gather(self, x: Tensor) -> Tensor:
        """See `Job.gather`."""
        if self.has_whole_batch:
            return x
        if self._group is None:  # with an order of operations of its own
            data = self.mesh.data
            self._group = data.duplicate() if data.size > 1 else data
        return gather_rows(x, self._group, self.is_placeholder)

    def take(self, make: Callable[[int], Tensor] | Tensor) -> Tensor:
        """See `Job.rows`."""
        batch = self.batch
        if batch is None:
            raise BadInput("job.rows gives rows of a batch: call it inside a loop over job.batches")
        if isinstance(make, Tensor):
            everything = make
        else:
            self._draws += 1
            turn = self.mesh.data.rank if self.has_whole_batch else 0
            with fork_rng(self.device):
                seed_generators(self.device, mix(self.seed, 8, self._number, self._draws, turn))
                everything = make(batch.total)
        if everything.dim() == 0 or len(everything) != batch.total:
            raise BadInput(
                f"job.rows needs a row for each of the {batch.total} samples of the global batch, "
                f"not a tensor of shape {tuple(everything.shape)}"
            )
        data = self.mesh.data
        split = BatchSplit() if self.has_whole_batch else BatchSplit(data.rank, data.size)
        rows: Tensor = take(everything, split.rows(batch.total))
        if not self._parts:
            return rows.to(self.device)
        placed: Tensor = self._parts[0].step.cutter.place(rows, len(rows))
        return placed

    @property
    def has_whole_batch(self) -> bool:
        """Whether replicas take whole batches in turns."""
        return self.batch is not None and self.batch.concurrent > 1
