"""What every compression can do: a flat tensor as bytes, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import ShoalError


class Compressor(Protocol):
    """Turns flat floating-point tensors into bytes. What is lost is the caller's to keep.

    The number of bytes follows from the number of elements alone, so a receiver knows how much
    to expect and refuses anything else. Bytes are those of the machine, little-endian here.
    """

    def num_bytes(self, numel: int) -> int:
        """How many bytes `numel` elements become; a multiple of 4."""
        ...

    def pack(self, x: Tensor) -> Tensor:
        """`x` (flat, floating-point) as a flat uint8 tensor of `num_bytes(x.numel())`."""
        ...

    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        """What the bytes stand for: `numel` float32 elements."""
        ...


def join(parts: Sequence[Tensor], num_bytes: int) -> Tensor:
    """The bytes of some tensors one after the other, filled up with zeros."""
    pieces = [part.contiguous().view(torch.uint8).view(-1) for part in parts]
    filler = num_bytes - sum(piece.numel() for piece in pieces)
    return torch.cat([*pieces, pieces[0].new_zeros(filler)])


def split(
    payload: Tensor, parts: Sequence[tuple[int, torch.dtype]], num_bytes: int
) -> list[Tensor]:
    """Undo `join`: flat tensors of so many elements of a type."""
    if payload.dtype != torch.uint8 or payload.numel() != num_bytes:
        raise ShoalError(
            f"a compressed tensor of {num_bytes} bytes was expected, and {payload.numel()} "
            f"elements of {payload.dtype} came"
        )
    found = []
    start = 0
    for numel, dtype in parts:
        stop = start + numel * dtype.itemsize
        found.append(payload[start:stop].contiguous().view(dtype))
        start = stop
    return found


def whole_words(num_bytes: int) -> int:
    """Rounded up to a multiple of 4, so that payloads in a row stay aligned."""
    return -(-num_bytes // 4) * 4


def in_chunks(x: Tensor, size: int) -> Tensor:
    """Rows of `size` elements; the last one is filled up with zeros."""
    rows = -(-x.numel() // size)
    return torch.nn.functional.pad(x, (0, rows * size - x.numel())).view(rows, size)
