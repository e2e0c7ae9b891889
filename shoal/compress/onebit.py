"""One bit an element: signs, after a rotation that makes all elements about equally large.

Signs of an unrotated gradient represent its few large elements badly: all elements of a chunk get
one size, and the rest of the large ones stays in the residual for many steps. A random rotation
(random signs, then a Hadamard transform) spreads every element over its chunk. Signs then lose
about 36% of the square of the norm, for any gradient.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from shoal.compress.compressor import Compressor, join, round_up_to_words, split, to_chunks

ROWS = 16
COLUMNS = 32
CHUNK = ROWS * COLUMNS
_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


class OneBit(Compressor):
    """Signs of each 512 rotated elements and their mean size (bf16): 66 bytes for 512, and 4.

    The 4 bytes seed the random signs. They are computed from the elements, so they differ from
    step to step, and the same tensor gives the same bytes.
    """

    def num_bytes(self, numel: int) -> int:
        return round_up_to_words(4 + -(-numel // CHUNK) * (2 + CHUNK // 8))

    def pack(self, x: Tensor) -> Tensor:
        x = x.float()
        seed = x.sum().view(1).view(torch.int32)
        rotated = _transform(to_chunks(x, CHUNK) * _random_signs(seed))
        scales = rotated.abs().mean(1).bfloat16()
        bits = (rotated >= 0).view(-1, 8) * _weights(x.device)
        signs = bits.sum(1, dtype=torch.uint8)
        return join([seed, scales, signs], self.num_bytes(x.numel()))

    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        chunks = -(-numel // CHUNK)
        layout = [(1, torch.int32), (chunks, torch.bfloat16), (chunks * CHUNK // 8, torch.uint8)]
        seed, scales, signs = split(payload, layout, self.num_bytes(numel))
        bits = signs.unsqueeze(1).bitwise_and(_weights(payload.device)).ne(0).view(chunks, CHUNK)
        rotated = torch.where(bits, 1.0, -1.0) * scales.float().unsqueeze(1)
        return (_transform(rotated) * _random_signs(seed)).view(-1)[:numel]


def _transform(rows: Tensor) -> Tensor:
    """The Hadamard transform of every row; applied twice it is the identity.

    As a matrix of 16 x 32: one small product along each side.
    """
    along, across = (_hadamard(n).to(rows.device) for n in (ROWS, COLUMNS))
    return (along @ rows.view(-1, ROWS, COLUMNS) @ across).view(-1, CHUNK)


@functools.cache
def _hadamard(n: int) -> Tensor:
    """n x n, symmetric and orthogonal; n is a power of 2."""
    if n == 1:
        return torch.ones(1, 1)
    half = _hadamard(n // 2) / math.sqrt(2)
    return torch.cat([torch.cat([half, half], 1), torch.cat([half, -half], 1)])


def _random_signs(seed: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(int(seed))
    return (torch.randint(0, 2, (CHUNK,), generator=generator) * 2.0 - 1.0).to(seed.device)


def _weights(device: torch.device) -> Tensor:
    return torch.tensor(_BITS, dtype=torch.uint8, device=device)
