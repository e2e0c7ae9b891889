"""Small integers with a scale for every chunk: int8 and onebit."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.compress.compressor import Compressor, in_chunks, join, split, whole_words

INT8_CHUNK = 256
ONEBIT_CHUNK = 1024
_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


class Int8(Compressor):
    """-127 to 127 times a scale of each 256 elements: n + n/64 bytes."""

    def num_bytes(self, numel: int) -> int:
        return whole_words(4 * -(-numel // INT8_CHUNK) + numel)

    def pack(self, x: Tensor) -> Tensor:
        chunks = in_chunks(x.float(), INT8_CHUNK)
        scales = chunks.abs().amax(1) / 127
        steps = chunks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
        numbers = steps.round_().to(torch.int8).view(-1)[: x.numel()]
        return join([scales, numbers], self.num_bytes(x.numel()))

    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        parts = [(-(-numel // INT8_CHUNK), torch.float32), (numel, torch.int8)]
        scales, numbers = split(payload, parts, self.num_bytes(numel))
        chunks = in_chunks(numbers.float(), INT8_CHUNK) * scales.unsqueeze(1)
        return chunks.view(-1)[:numel]


class OneBit(Compressor):
    """Signs, times the mean size of each 1,024 elements: n/8 + n/256 bytes."""

    def num_bytes(self, numel: int) -> int:
        return whole_words(4 * -(-numel // ONEBIT_CHUNK) + -(-numel // 8))

    def pack(self, x: Tensor) -> Tensor:
        sizes = in_chunks(x.float().abs(), ONEBIT_CHUNK).sum(1)
        scales = sizes / _chunk_lengths(x.numel(), sizes)
        bits = in_chunks((x >= 0).to(torch.uint8), 8)
        weights = torch.tensor(_BITS, dtype=torch.uint8, device=x.device)
        signs = (bits * weights).sum(1, dtype=torch.uint8)
        return join([scales, signs], self.num_bytes(x.numel()))

    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        parts = [(-(-numel // ONEBIT_CHUNK), torch.float32), (-(-numel // 8), torch.uint8)]
        scales, packed = split(payload, parts, self.num_bytes(numel))
        weights = torch.tensor(_BITS, dtype=torch.uint8, device=payload.device)
        bits = packed.unsqueeze(1).bitwise_and(weights).ne(0).view(-1)[:numel]
        signs = in_chunks(bits.float().mul_(2).sub_(1), ONEBIT_CHUNK)
        return (signs * scales.unsqueeze(1)).view(-1)[:numel]


def _chunk_lengths(numel: int, like: Tensor) -> Tensor:
    lengths = torch.full_like(like, ONEBIT_CHUNK)
    if numel % ONEBIT_CHUNK:
        lengths[-1] = numel % ONEBIT_CHUNK
    return lengths
