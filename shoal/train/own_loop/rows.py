"""Rows of the global batch in a loop of the user's own: which ones, and how they are gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.comm.mesh import Mesh
from shoal.data import AnyBatch, Batch, DictBatch, batch_of
from shoal.data.rows import take
from shoal.data.sampling import BatchSplit, FullDatasetBatch, mix
from shoal.errors import BadInput
from shoal.replica.microbatch_context import fork_rng, seed_generators
from shoal.replica.split.mapping import gather_rows

if TYPE_CHECKING:
    from shoal.train.own_loop.part import LoopPart


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
        data = self.mesh.data
        if self.has_whole_batch or data.size == 1:
            return x
        if self._group is None:  # with an order of operations of its own
            self._group = data.duplicate()
        rows = x[:0] if self.is_placeholder else x
        if x.dtype == torch.bool:
            return gather_rows(rows.to(torch.uint8), self._group).bool()
        return gather_rows(rows, self._group)

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
