"""Two bytes an element: fp16 and bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.compress.compressor import Compressor, join, split, whole_words


class Bf16(Compressor):
    """8 bits of precision, the range of float32: 2n bytes."""

    def num_bytes(self, numel: int) -> int:
        return whole_words(2 * numel)

    def pack(self, x: Tensor) -> Tensor:
        return join([x.bfloat16()], self.num_bytes(x.numel()))

    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        (halves,) = split(payload, [(numel, torch.bfloat16)], self.num_bytes(numel))
        return halves.float()


class Fp16(Compressor):
    """11 bits of precision: 2n + 4 bytes.

    A power of two goes along that brings the largest element near fp16's upper end: nothing
    overflows, and what is 2^-29 times as large as it still has full precision.
    """

    def num_bytes(self, numel: int) -> int:
        return whole_words(4 + 2 * numel)

    def pack(self, x: Tensor) -> Tensor:
        x = x.float()
        largest = torch.linalg.vector_norm(x, torch.inf).view(1)
        exponent = torch.frexp(largest).exponent.clamp(min=-100) - 15
        scale = torch.ldexp(torch.ones_like(largest), exponent)
        return join([scale, (x / scale).half()], self.num_bytes(x.numel()))

    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        parts = [(1, torch.float32), (numel, torch.float16)]
        scale, halves = split(payload, parts, self.num_bytes(numel))
        return halves.float() * scale
