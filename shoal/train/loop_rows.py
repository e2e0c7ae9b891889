"""Rows of the global batch in a loop of the user's own: which ones, and how they are gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.comm.mesh import Mesh
from shoal.data.batch import AnyBatch, Batch, DictBatch, batch_of
from shoal.data.rows import move_to, reverse_rows, take, widen
from shoal.data.sampling import BatchSplit, FullDatasetBatch, mix
from shoal.errors import BadInput
from shoal.replica.microbatch import fork_rng, seed_generators
from shoal.train.cut_batch import BatchCutter
from shoal.train.gather_rows import gather_rows

Make = Callable[[int], Tensor]


class LoopRows:
    """What is known of the batch that `job.batches` yielded last.

    `cutters` say what `shoal verify` changes: reversed samples, double precision.
    """

    def __init__(
        self,
        mesh: Mesh,
        seed: int,
        device: torch.device,
        cutters: Callable[[], Sequence[BatchCutter]],
    ):
        self.mesh = mesh
        self.seed = seed
        self.device = device
        self.batch: AnyBatch | None = None
        self._cutters = cutters
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
        content = move_to(part.content, self.device)
        if any(cutter.reverses for cutter in self._cutters()):
            content = reverse_rows(content, part.rows)
        if any(cutter.widens for cutter in self._cutters()):
            content = widen(content)
        if not isinstance(batch, (Batch, DictBatch)):
            return content
        moved = batch_of(content, part.total, part.microbatch_sizes)
        moved.concurrent = part.concurrent
        return moved

    def gather(self, x: Tensor) -> Tensor:
        """See `Job.gather`."""
        if x.dim() == 0:
            raise BadInput("job.gather takes a tensor with a dimension for samples, not a number")
        if self.has_whole_batch:
            return x
        if self._group is None:  # with an order of operations of its own
            data = self.mesh.data
            self._group = data.duplicate() if data.size > 1 else data
        return gather_rows(x, self._group, self.is_placeholder)

    def take(self, make: Make | Tensor) -> Tensor:
        """See `Job.rows`."""
        batch = self.batch
        if batch is None:
            raise BadInput("job.rows gives rows of a batch: call it inside a loop over job.batches")
        everything = make if isinstance(make, Tensor) else self._drawn(make, batch)
        if everything.dim() == 0 or len(everything) != batch.total:
            raise BadInput(
                f"job.rows needs a row for each of the {batch.total} samples of the global batch, "
                f"not a tensor of shape {tuple(everything.shape)}"
            )
        data = self.mesh.data
        split = BatchSplit() if self.has_whole_batch else BatchSplit(data.rank, data.size)
        return self._moved_rows(take(everything, split.rows(batch.total)))

    @property
    def has_whole_batch(self) -> bool:
        """Whether replicas take whole batches in turns."""
        return self.batch is not None and self.batch.concurrent > 1

    def _drawn(self, make: Make, batch: AnyBatch) -> Tensor:
        self._draws += 1
        turn = self.mesh.data.rank if self.has_whole_batch else 0
        with fork_rng(self.device):
            seed_generators(self.device, mix(self.seed, 8, self._number, self._draws, turn))
            return make(batch.total)

    def _moved_rows(self, rows: Tensor) -> Tensor:
        cutters = self._cutters()
        if rows.dim() and any(cutter.reverses for cutter in cutters):
            rows = rows.flip(0)
        widens = rows.is_floating_point() and any(cutter.widens for cutter in cutters)
        dtype = torch.float64 if widens else rows.dtype
        return rows.to(self.device, dtype, non_blocking=True)
