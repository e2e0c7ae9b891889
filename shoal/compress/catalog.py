"""Every compressor by the text of `compress="…"`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.compress import Compressor, join, round_up_to_words, split, to_chunks
from shoal.compress.powersgd import PowerSgd
from shoal.errors import ShoalError
from shoal.strategy.options import read_setting

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


def make_compressor(
    text: str, shapes: Sequence[tuple[int, Sequence[int]]], numel: int
) -> Compressor:
    """The compressor of flat tensors of `numel` elements.

    `shapes` are the parameters in them: where each begins, and its shape.
    """
    name, settings = read_setting(text)
    match name:
        case "fp16":
            return Fp16()
        case "bf16":
            return Bf16()
        case "int8":
            return Int8()
        case "onebit":
            return OneBit()
        case "topk":
            return TopK(settings[""])
    return PowerSgd(int(settings["rank"]), shapes, numel)
