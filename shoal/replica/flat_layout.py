"""Where the parameters of a model lie in one flat buffer.

    [ header | p0 .. | p1 ...... | p2 . | p3 ........ ]
      ^ room for the loss and one flag per parameter, used by the gradients (`grad_buckets.py`)

A layout has no memory of its own. Buckets and shards are slices of it. A complex parameter lies
there as pairs of numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.errors import BadInput
from shoal.schedules.shards import shard_edges

ALIGN_BYTES = 64  # a parameter starts on a cache line, in every process alike


@dataclass(frozen=True)
class ParamRange:
    """Where one parameter lies in the buffer, in elements."""

    name: str
    start: int
    stop: int


class FlatLayout:
    """The trainable parameters of a model, their order, and their ranges in one buffer."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]):
        self.named = [(name, p) for name, p in named if p.requires_grad and p.numel()]
        if not self.named:
            raise BadInput("the model has no parameter that requires a gradient")
        self.params = [p for _, p in self.named]
        self._is_complex = [p.is_complex() for p in self.params]
        self.dtype, self.device = _common_dtype_and_device(self.named)
        self._align = max(1, ALIGN_BYTES // self.dtype.itemsize)
        self.header_size = 1 + len(self.params)
        self.offset = self.round_up(self.header_size) if self.header_fits else 0
        self.ranges = self._lay_out()
        self.size = self.round_up(self.ranges[-1].stop)

    @property
    def header_fits(self) -> bool:
        """Whether the loss keeps its precision in the dtype of the gradients.

        If it does not, the header has memory of its own and the buffer has no room for it.
        """
        return self.dtype in (torch.float32, torch.float64)

    @property
    def header_dtype(self) -> torch.dtype:
        return self.dtype if self.header_fits else torch.float32

    def buckets(
        self, num_bytes: int, first_bytes: int | None = None, within: slice | None = None
    ) -> list[slice]:
        """Split the buffer into slices of about `num_bytes`, at parameter boundaries, last first.

        The first bucket is smaller (`first_bytes`), so that communication starts early. `within`
        is a slice to split instead of the entire buffer, such as a shard.
        """
        width = self.dtype.itemsize
        wanted = max(1, (first_bytes or num_bytes) // width)
        begin, stop = (0, self.size) if within is None else (within.start, within.stop)
        buckets = []
        for param in reversed(self.ranges[1:]):
            if begin < param.start < stop and stop - param.start >= wanted:
                buckets.append(slice(param.start, stop))
                stop = param.start
                wanted = max(1, num_bytes // width)
        return [*buckets, slice(begin, stop)] if begin < stop else buckets

    def shards(self, n: int) -> list[slice]:
        """`n` consecutive slices, split at parameter boundaries, as equal in size as those allow.

        A shard may be empty when there are fewer parameters than shards.
        """
        boundaries = [self.offset, *(param.start for param in self.ranges[1:]), self.size]
        return [slice(a, b) for a, b in itertools.pairwise(shard_edges(boundaries, n))]

    def params_in(self, where: slice) -> list[int]:
        """The indices of the parameters in a slice that is split at their boundaries."""
        return [i for i, r in enumerate(self.ranges) if where.start <= r.start < where.stop]

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

    def round_up(self, elements: int) -> int:
        """The next position where a parameter may start."""
        return -(-elements // self._align) * self._align

    def _lay_out(self) -> list[ParamRange]:
        ranges = []
        start = self.offset
        for name, p in self.named:
            numbers = p.numel() * (2 if p.is_complex() else 1)
            ranges.append(ParamRange(name, start, start + numbers))
            start = self.round_up(start + numbers)
        return ranges


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
