"""The largest elements only: their indices and values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.compress.compressor import Compressor, join, round_up_to_words, split
from shoal.errors import ShoalError

BLOCK = 1 << 16  # elements that a 16-bit index can address
_HALF = BLOCK // 2  # indices are sent as signed numbers


class TopK(Compressor):
    """A fraction of each 65,536 elements, those of the largest size, at least one: 4 bytes each.

    An index in its block takes 2 bytes, a value 2 (bf16).
    """

    def __init__(self, fraction: float):
        self.fraction = fraction

    def count(self, numel: int) -> int:
        """How many of `numel` elements are kept."""
        full, rest = divmod(numel, BLOCK)
        return full * self._of_block(BLOCK) + self._of_block(rest)

    def num_bytes(self, numel: int) -> int:
        return round_up_to_words(4 * self.count(numel))

    def pack(self, x: Tensor) -> Tensor:
        end = x.numel() // BLOCK * BLOCK
        indices = []
        values = []
        for rows in (x[:end].view(-1, BLOCK), x[end:].view(1, -1)):
            where = rows.abs().topk(self._of_block(rows.shape[1]), sorted=False).indices
            indices.append((where - _HALF).to(torch.int16).view(-1))
            values.append(rows.gather(1, where).bfloat16().view(-1))
        return join([*indices, *values], self.num_bytes(x.numel()))

    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        count = self.count(numel)
        full, rest = divmod(numel, BLOCK)
        layout = [(count, torch.int16), (count, torch.bfloat16)]
        indices, values = split(payload, layout, self.num_bytes(numel))
        where = indices.long() + _HALF
        in_full = full * self._of_block(BLOCK)
        if count > in_full and int(where[in_full:].max()) >= rest:
            raise ShoalError(f"a topk message is damaged: it has an index outside of {numel}")
        starts = torch.arange(full, device=payload.device) * BLOCK
        where[:in_full] += starts.repeat_interleave(self._of_block(BLOCK))
        where[in_full:] += full * BLOCK
        x = torch.zeros(numel, device=payload.device)
        x[where] = values.float()
        return x

    def _of_block(self, numel: int) -> int:
        return min(numel, max(1, math.ceil(self.fraction * numel)))
