"""Small integers with a scale for every chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.compress.compressor import Compressor, join, round_up_to_words, split, to_chunks

INT8_CHUNK = 256


class Int8(Compressor):
    """-127 to 127 times a scale of each 256 elements: n + n/64 bytes."""

    def num_bytes(self, numel: int) -> int:
        return round_up_to_words(4 * -(-numel // INT8_CHUNK) + numel)

    def pack(self, x: Tensor) -> Tensor:
        chunks = to_chunks(x.float(), INT8_CHUNK)
        scales = chunks.abs().amax(1) / 127
        steps = chunks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
        numbers = steps.round_().to(torch.int8).view(-1)[: x.numel()]
        return join([scales, numbers], self.num_bytes(x.numel()))

    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        layout = [(-(-numel // INT8_CHUNK), torch.float32), (numel, torch.int8)]
        scales, numbers = split(payload, layout, self.num_bytes(numel))
        chunks = to_chunks(numbers.float(), INT8_CHUNK) * scales.unsqueeze(1)
        return chunks.view(-1)[:numel]
