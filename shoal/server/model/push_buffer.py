"""Memory for the pushes of one worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.protocol import Refused

_MAX_SPARE = 2


class RowPush(NamedTuple):
    """Gradients of rows of one table, from one worker; possibly of no row."""

    table: str
    ids: Tensor
    grads: Tensor
    lr: float


class PushTensors(NamedTuple):
    """Memory for one push."""

    gradients: Tensor  # [partial sums, elements of the slice]
    loss_flags: Tensor  # [partial sums, 1 + parameters]


class PendingPush(NamedTuple):
    """A push that is complete, and not applied or dropped yet."""

    tensors: PushTensors
    rows: Sequence[RowPush]


class PushBuffer:
    """The push that a worker is sending, and the numbers that make every push count once.

    sequence   ... committed          complete; its memory may be overwritten once it is released.
                                      Until then no other is received, unless some were lost
               committed + 1          the push that may be received next

    On a replicated server the next push is received into memory of its own (`arriving`), which
    becomes the buffer when the push is committed in all copies (`install`).
    """

    def __init__(self, gradients: Tensor, loss_flags: Tensor, in_chain: bool = False):
        self.gradients = gradients  # [partial sums, elements of the slice]
        self.loss_flags = loss_flags  # [partial sums, 1 + parameters]
        self.in_chain = in_chain
        self._arriving: PushTensors | None = None
        self._spare: list[PushTensors] = []
        self.committed = 0
        self.decompressed = 0  # the push whose compressed gradients are in `gradients`
        self.rows: list[RowPush] = []  # that have been received, for the next push
        self.staged: dict[int, PendingPush] = {}  # by sequence, until it is applied or dropped

    @property
    def arriving(self) -> PushTensors:
        """Where the next push is received."""
        if not self.in_chain:
            return PushTensors(self.gradients, self.loss_flags)
        if self._arriving is None:
            self._arriving = self.new_tensors()
        return self._arriving

    def new_tensors(self) -> PushTensors:
        """Memory for a push that arrives, of the same form as the buffer."""
        if self._spare:
            return self._spare.pop()
        return PushTensors(torch.empty_like(self.gradients), torch.empty_like(self.loss_flags))

    def take_arrived(self) -> PushTensors | None:
        """The push that has been received; None if it is in the buffer already."""
        arrived, self._arriving = self._arriving, None
        return arrived

    def install(self, tensors: PushTensors, recycles: bool) -> None:
        """Make this push the one in the buffer; the memory before it may be used again."""
        if recycles and len(self._spare) < _MAX_SPARE:
            self._spare.append(PushTensors(self.gradients, self.loss_flags))
        self.gradients, self.loss_flags = tensors

    @property
    def is_free(self) -> bool:
        """Whether the buffer may be overwritten."""
        return self.committed not in self.staged

    def is_repeated(self, sequence: int) -> bool:
        """Whether this push was committed before; a worker resends after a broken connection."""
        return sequence <= self.committed

    def expect(self, sequence: int) -> None:
        """Refuse a push that skips one, or that would overwrite one that is still needed."""
        if sequence != self.committed + 1:
            raise Refused(f"push {sequence} is out of order: expected {self.committed + 1}")
        if not self.is_free:
            raise Refused(f"push {sequence} arrives before push {self.committed} is applied")

    def commit(self, sequence: int, rows: Sequence[RowPush]) -> None:
        self.expect(sequence)
        self.committed = sequence
        self.staged[sequence] = PendingPush(PushTensors(self.gradients, self.loss_flags), rows)

    def skip_to(self, sequence: int) -> None:
        """Pushes up to this one are lost; the present one stays in its memory."""
        if not self.is_free:
            self.gradients, self.loss_flags = self.new_tensors()
        self.committed = sequence

    def take_rows(self) -> tuple[RowPush, ...]:
        """The rows that have been received for the next push."""
        rows = tuple(self.rows)
        self.rows.clear()
        return rows
