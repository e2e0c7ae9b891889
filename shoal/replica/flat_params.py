"""A model's parameters as views of one buffer.

    data           [ ...... | p0 .. | p1 ...... | p2 . | p3 ........ ]
    grads.buffer   [ header | p0 .. | p1 ...... | p2 . | p3 ........ ]

Everything that workers exchange is a slice of these buffers: buckets and shards
(`schedules/buffer_layout.py`). The header has room for the loss and one flag per parameter. How
gradients are collected is in `grad_buckets.py`.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.replica.compiled import Compiler
from shoal.replica.grad_buckets import GradBuckets
from shoal.schedules.buffer_layout import BufferLayout


@dataclass(frozen=True)
class ParamRange:
    """Where one parameter lies in the buffer, in elements."""

    name: str
    start: int
    stop: int


class FlatLayout(BufferLayout):
    """The trainable parameters of a model, their order, and their ranges in one buffer.

    It has no memory of its own. A complex parameter lies there as pairs of numbers.
    """

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

    def numbers_in(self, memory: mmap.mmap, start: int = 0) -> Tensor:
        """A buffer in memory that is shared, from this byte on."""
        return torch.frombuffer(memory, dtype=self.dtype, count=self.size, offset=start)

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


class FlatParams(FlatLayout):
    """The trainable parameters of a model, moved into one buffer in place.

    `data` holds the parameters from construction on. `grads` collects their gradients.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], device: torch.device | None = None
    ):
        """They go to `device`, where they are not there already."""
        super().__init__(named)
        self.device = device or self.device
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

    def compile(self, compiler: Compiler) -> bool:
        """Compile the modules that have to be called one by one; False: a model may be compiled."""
        return False

    def full_params(
        self, only: int | None = None, computes: bool = True
    ) -> AbstractContextManager[None]:
        """While the block runs all parameters are here, on all ranks or on one; for reading.

        Unless it `computes` with them, they may be where shards are: in the host's memory.
        """
        return nullcontext()

    def held_params(self) -> AbstractContextManager[None]:
        """While the block runs the parameters of this rank's shard are here, to be overwritten."""
        return nullcontext()

    def reshard(self) -> None:
        """Release parameters that are gathered only while they are used."""

    def _move(self) -> Tensor:
        """Take the parameters into one buffer; returns it."""
        data = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        self.move_to(data, copy=True)
        return data
