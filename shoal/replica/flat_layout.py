"""Where the parameters of a model lie in one flat buffer.

    [ header | p0 .. | p1 ...... | p2 . | p3 ........ ]
      ^ room for the loss and one flag per parameter, used by the gradients (`grad_buckets.py`)

A layout has no memory of its own. Buckets and shards are slices of it
(`schedules/buffer_layout.py`). A complex parameter lies there as pairs of numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.schedules.buffer_layout import BufferLayout


@dataclass(frozen=True)
class ParamRange:
    """Where one parameter lies in the buffer, in elements."""

    name: str
    start: int
    stop: int


class FlatLayout(BufferLayout):
    """The trainable parameters of a model, their order, and their ranges in one buffer."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]):
        self.named = [(name, p) for name, p in named if p.requires_grad and p.numel()]
        if not self.named:
            raise BadInput("the model has no parameter that requires a gradient")
        self.params = [p for _, p in self.named]
        self._is_complex = [p.is_complex() for p in self.params]
        self.dtype, self.device = _common_dtype_and_device(self.named)
        numbers = [p.numel() * (2 if p.is_complex() else 1) for p in self.params]
        super().__init__(numbers, self.dtype.itemsize, self.header_fits)
        ends = zip(self.named, self.starts, self.sizes, strict=True)
        self.ranges = [ParamRange(name, start, start + size) for (name, _), start, size in ends]

    @property
    def header_fits(self) -> bool:
        """Whether the loss keeps its precision in the dtype of the gradients; else it is apart."""
        return self.dtype in (torch.float32, torch.float64)

    def gaps(self) -> Tensor:
        """The positions between and behind parameters that belong to none of them."""
        is_gap = torch.ones(self.size, dtype=torch.bool)
        is_gap[: self.offset] = False
        for param in self.ranges:
            is_gap[param.start : param.stop] = False
        return is_gap.nonzero().view(-1).to(self.device)

    def view(self, i: int, memory: Tensor, start: int) -> Tensor:
        """Parameter `i` (or its gradient) in memory that stands for the buffer from `start` on."""
        param = self.ranges[i]
        shape = self.params[i].shape
        piece = memory[param.start - start : param.stop - start]
        if self._is_complex[i]:
            return torch.view_as_complex(piece.view(*shape, 2))
        return piece.view(shape)


def _common_dtype_and_device(
    named: list[tuple[str, nn.Parameter]],
) -> tuple[torch.dtype, torch.device]:
    first_name, first = named[0]
    dtype = first.dtype.to_real()
    for name, p in named:
        if p.dtype.to_real() != dtype or p.device != first.device:
            raise BadInput(
                f"trainable parameters must share one dtype and device: {first_name} is "
                f"{first.dtype} on {first.device}, {name} is {p.dtype} on {p.device}; for mixed "
                'precision keep the model in float32 and pass precision="bf16" to job.step'
            )
    return dtype, first.device


def real_view(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of numbers in the same memory, which can be sent."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
