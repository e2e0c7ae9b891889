"""Sums over all replicas in compressed form, with what compression loses kept for later.

Error feedback: what a replica could not send of a step (its residual) is added to what it sends
in the next. Nothing is lost, only delayed. All replicas end with the same bits, since all unpack
the same bytes.

A sum goes in stages, written as a generator: what it yields is under way while other things run.
Tensors that a later stage does not need are deleted before the generator yields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple

from torch import Tensor

from shoal.comm.group import Group
from shoal.sync.residuals import check_residuals, take_residual
from shoal.transport.transport import Work


class SliceMemory(NamedTuple):
    """Bytes that the sum of one slice takes."""

    kept: int  # from step to step, besides the residual
    first: int  # in flight in its first stage
    second: int  # in flight in its second stage


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


class CompressedSum:
    """Adds up slices of a flat buffer over all replicas. All ranks call it in the same order."""

    memory_column: ClassVar[str] = "residuals"
    group: Group
    residual: Tensor
    unused: Tensor  # positions of the buffer between parameters, and of copies
    under_way: list[Staged]
    feedback: bool = True  # False: what compression loses is lost, to see what that does
    on_stage: Callable[[], None] | None = None  # called when a stage has begun, to look at memory

    def start(self, x: Tensor, at: slice) -> None:
        """Begin to replace `x`, which lies at `at` of the buffer, by (about) the sum of all."""
        self.under_way.append(Staged(self.stages(x, at)))
        self._notify()

    def finish(self) -> None:
        """Finish all sums, side by side."""
        while self.under_way:
            advancing = list(self.under_way)
            for staged in advancing:
                if not staged.advance():
                    self.under_way.remove(staged)
                self._notify()

    def stages(self, x: Tensor, at: slice) -> Iterator[Work]:
        """Replace `x` stage by stage; yields what is under way."""
        raise NotImplementedError

    def _notify(self) -> None:
        if self.on_stage is not None:
            self.on_stage()

    def clear_unused(self) -> None:
        """What was lost there is of no use, and no checkpoint has it."""
        self.residual[self.unused] = 0.0

    def state(self) -> dict[str, Tensor]:
        """What has to be saved of all workers, at rank 0."""
        residuals = self.residual.new_empty(self.group.size, self.residual.numel())
        is_root = self.group.rank == 0
        self.group.gather(residuals if is_root else None, self.residual).wait()
        return {f"worker/{r}/residual": row for r, row in enumerate(residuals)} if is_root else {}

    def check_state(self, tensors: dict[str, Tensor]) -> None:
        """Refuse what `load_state` could not take."""
        check_residuals(tensors, self.residual)

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Each worker takes its own back; another number of workers splits the sum equally."""
        take_residual(tensors, self.residual, self.group.rank, self.group.size)
