"""A model's parameters as views of one buffer.

    data           [ ...... | p0 .. | p1 ...... | p2 . | p3 ........ ]
    grads.buffer   [ header | p0 .. | p1 ...... | p2 . | p3 ........ ]

Everything that workers exchange is a slice of these buffers. Where parameters lie is in
`flat_layout.py`; how gradients are collected is in `grad_buckets.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from shoal.replica.flat_layout import FlatLayout
from shoal.replica.grad_buckets import GradBuckets


class FlatParams(FlatLayout):
    """The trainable parameters of a model, moved into one buffer in place.

    `data` holds the parameters from construction on. `grads` collects their gradients.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]):
        super().__init__(named)
        self.data = self._move()
        self.grads = GradBuckets(self)
        self.splits_backward = False  # whether gradient hooks see nothing of a backward

    def move_to(self, data: Tensor, copy: bool = False) -> None:
        """Make the parameters views of `data`, which has their values or receives them (`copy`)."""
        for i, p in enumerate(self.params):
            view = self.view(i, data, 0)
            if copy:
                view.copy_(p.data)
            p.data = view
        self.data = data

    def zero_grad(self) -> None:
        """Set `p.grad` to None, so that the next backward may put its own tensors there."""
        for p in self.params:
            p.grad = None
        self.grads.release()

    def forward_context(self) -> AbstractContextManager[None]:
        """Around a forward: the parameters that it uses are here."""
        return nullcontext()

    def full_params(self, only: int | None = None) -> AbstractContextManager[None]:
        """While the block runs all parameters are here, on all ranks or on one; for reading."""
        return nullcontext()

    def reshard(self) -> None:
        """Release parameters that are gathered only while they are used."""

    def _move(self) -> Tensor:
        """Take the parameters into one buffer; returns it."""
        data = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        self.move_to(data, copy=True)
        return data
