"""Tensors as fewer bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import ShoalError


class Compressor(Protocol):
    """Turns flat floating-point tensors into bytes. The caller keeps what is lost (error feedback).

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


def join(tensors: Sequence[Tensor], num_bytes: int) -> Tensor:
    """The bytes of the tensors one after the other, padded with zeros to `num_bytes`."""
    raw = [tensor.contiguous().view(torch.uint8).view(-1) for tensor in tensors]
    padding = num_bytes - sum(one.numel() for one in raw)
    return torch.cat([*raw, raw[0].new_zeros(padding)])


def split(
    payload: Tensor, layout: Sequence[tuple[int, torch.dtype]], num_bytes: int
) -> list[Tensor]:
    """The inverse of `join`: flat tensors of (number of elements, dtype)."""
    if payload.dtype != torch.uint8 or payload.numel() != num_bytes:
        raise ShoalError(
            f"expected a compressed tensor of {num_bytes} bytes, got {payload.numel()} "
            f"elements of {payload.dtype}"
        )
    tensors = []
    start = 0
    for numel, dtype in layout:
        stop = start + numel * dtype.itemsize
        tensors.append(payload[start:stop].contiguous().view(dtype))
        start = stop
    return tensors


def round_up_to_words(num_bytes: int) -> int:
    """Rounded up to a multiple of 4, so that consecutive payloads stay aligned."""
    return -(-num_bytes // 4) * 4


def to_chunks(x: Tensor, size: int) -> Tensor:
    """Rows of `size` elements; the last one is padded with zeros."""
    rows = -(-x.numel() // size)
    return torch.nn.functional.pad(x, (0, rows * size - x.numel())).view(rows, size)
