"""Only the largest elements: where they are and what they are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.compress.compressor import Compressor, join, split, whole_words
from shoal.errors import BadInput, ShoalError


class TopK(Compressor):
    """The `share` of the elements with the largest size, at least one: 6 bytes for each.

    An index takes 4 bytes, a value 2 (bf16).
    """

    def __init__(self, share: float):
        self.share = share

    def count(self, numel: int) -> int:
        """How many of `numel` elements are kept."""
        return min(numel, max(1, math.ceil(self.share * numel)))

    def num_bytes(self, numel: int) -> int:
        return whole_words(6 * self.count(numel))

    def pack(self, x: Tensor) -> Tensor:
        if x.numel() > 2**31 - 1:
            raise BadInput("topk numbers elements with 31 bits: take a smaller bucket_mb")
        where = torch.topk(x.abs(), self.count(x.numel()), sorted=False).indices
        return join([where.int(), x[where].bfloat16()], self.num_bytes(x.numel()))

    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        count = self.count(numel)
        parts = [(count, torch.int32), (count, torch.bfloat16)]
        where, values = split(payload, parts, self.num_bytes(numel))
        if count and not 0 <= int(where.min()) <= int(where.max()) < numel:
            raise ShoalError(f"a topk message names an element outside of {numel}: it is damaged")
        found = torch.zeros(numel, device=payload.device)
        found[where.long()] = values.float()
        return found
