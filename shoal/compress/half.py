"""Two bytes an element: fp16 and bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.compress.compressor import Compressor, join, round_up_to_words, split


class Bf16(Compressor):
    """8 bits of precision, the range of float32: 2n bytes."""

    def num_bytes(self, numel: int) -> int:
        return round_up_to_words(2 * numel)

    def pack(self, x: Tensor) -> Tensor:
        return join([x.bfloat16()], self.num_bytes(x.numel()))

    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        (values,) = split(payload, [(numel, torch.bfloat16)], self.num_bytes(numel))
        return values.float()


class Fp16(Compressor):
    """11 bits of precision: 2n + 4 bytes.

    A power of two scales the largest element to the upper end of fp16: nothing overflows, and an
    element 2^-29 times as large still has full precision. The scale is sent along.
    """

    def num_bytes(self, numel: int) -> int:
        return round_up_to_words(4 + 2 * numel)

    def pack(self, x: Tensor) -> Tensor:
        x = x.float()
        largest = torch.linalg.vector_norm(x, torch.inf).view(1)
        exponent = torch.frexp(largest).exponent.clamp(min=-100) - 15
        scale = torch.ldexp(torch.ones_like(largest), exponent)
        return join([scale, (x / scale).half()], self.num_bytes(x.numel()))

    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        layout = [(1, torch.float32), (numel, torch.float16)]
        scale, values = split(payload, layout, self.num_bytes(numel))
        return values.float() * scale
