"""Tensors as fewer bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.strategy.options import read_setting

Layout = list[tuple[int, torch.dtype]]  # flat tensors of so many elements, one after the other


class Compressor(Protocol):
    """Turns flat floating-point tensors into bytes. The caller keeps what is lost (error feedback).

    The number of bytes follows from the number of elements alone, so a receiver knows how much
    to expect and refuses anything else. Bytes are those of the machine, little-endian here.
    """

    def layout(self, numel: int) -> Layout:
        """The tensors that `numel` elements become."""

    def encode(self, x: Tensor) -> Sequence[Tensor]:
        """The tensors that stand for `x` (flat, floating-point), of any shape."""

    def decode(self, tensors: list[Tensor], numel: int) -> Tensor:
        """What the flat tensors of a message stand for: `numel` float32 elements."""

    def num_bytes(self, numel: int) -> int:
        """A multiple of 4, so that consecutive payloads stay aligned."""
        total = sum(count * dtype.itemsize for count, dtype in self.layout(numel))
        return -(-total // 4) * 4

    def pack(self, x: Tensor) -> Tensor:
        """`x` as a flat uint8 tensor of `num_bytes(x.numel())`."""
        raw = [t.contiguous().view(torch.uint8).view(-1) for t in self.encode(x)]
        padding = self.num_bytes(x.numel()) - sum(one.numel() for one in raw)
        return torch.cat([*raw, raw[0].new_zeros(padding)])

    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        """What the bytes stand for: `numel` float32 elements."""
        num_bytes = self.num_bytes(numel)
        if payload.dtype != torch.uint8 or payload.numel() != num_bytes:
            raise ShoalError(
                f"expected a compressed tensor of {num_bytes} bytes, got {payload.numel()} "
                f"elements of {payload.dtype}"
            )
        tensors = []
        start = 0
        for count, dtype in self.layout(numel):
            stop = start + count * dtype.itemsize
            tensors.append(payload[start:stop].contiguous().view(dtype))
            start = stop
        return self.decode(tensors, numel)


def to_chunks(x: Tensor, size: int) -> Tensor:
    """Rows of `size` elements; the last one is padded with zeros."""
    rows = -(-x.numel() // size)
    return torch.nn.functional.pad(x, (0, rows * size - x.numel())).view(rows, size)


@dataclass(frozen=True)
class ParameterMatrix:
    """A parameter of two or more dimensions: where it starts, and its sides when flattened."""

    start: int
    rows: int
    columns: int
    rank: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


class PowerSgd(Compressor):
    """Matrices as products of two thin ones, by one step of power iteration.

    M (n x m)  ~  P (n x r) · Qᵗ (r x m)        P = orthogonal(M·Q),  Q = Mᵗ·P

    Q starts from that of the previous step, orthogonalised, so the iteration continues over steps.
    Parameters that are no matrices, or would not get smaller, are sent uncompressed.

    `shapes` says where parameters lie in the tensor; what is between them is dropped. A message
    takes 4·(Σ r·(n + m) + elements of the rest) bytes. `basis` holds the Q of the last step.
    """

    def __init__(self, rank: int, shapes: Sequence[tuple[int, Sequence[int]]], numel: int):
        self.numel = numel
        self.matrices, self.rest = _partition(rank, shapes)
        self.num_left = sum(m.rows * m.rank for m in self.matrices)
        self.num_right = sum(m.columns * m.rank for m in self.matrices)
        self.num_rest: int = sum(s.stop - s.start for s in self.rest)
        generator = torch.Generator().manual_seed(0)
        self.basis = torch.randn(self.num_right, generator=generator)

    def layout(self, numel: int) -> Layout:
        return [(self.num_left + self.num_rest, torch.float32), (self.num_right, torch.float32)]

    def encode(self, x: Tensor) -> Sequence[Tensor]:
        left = self.project(x)
        self.orthogonalise(left)
        right = self.correlate(x, left)
        self.continue_from(right)
        return left, right

    def decode(self, tensors: list[Tensor], numel: int) -> Tensor:
        return self.expand(*tensors)

    # The steps of the algorithm. `left` holds every P and then the rest; `right` every Q.

    def project(self, x: Tensor) -> Tensor:
        """M·Q of every matrix, and the rest: linear in x, so projections can be summed."""
        x = x.float()
        bases = self._rights(self.basis.to(x.device))
        products = [
            (_matrix(x, m) @ basis).view(-1) for m, basis in zip(self.matrices, bases, strict=True)
        ]
        return torch.cat([*products, *(x[s] for s in self.rest)])

    def orthogonalise(self, left: Tensor) -> None:
        """Make the columns of every P orthogonal, in place."""
        for p in self._lefts(left):
            p.copy_(torch.linalg.qr(p).Q)

    def correlate(self, x: Tensor, left: Tensor) -> Tensor:
        """Mᵗ·P of every matrix; linear in x as well."""
        x = x.float()
        products = [
            (_matrix(x, m).T @ p).reshape(-1)
            for m, p in zip(self.matrices, self._lefts(left), strict=True)
        ]
        return torch.cat(products) if products else x.new_zeros(0)

    def expand(self, left: Tensor, right: Tensor) -> Tensor:
        """P·Qᵗ of every matrix, and the rest, where they lie in the tensor."""
        x = left.new_zeros(self.numel)
        for m, p, q in zip(self.matrices, self._lefts(left), self._rights(right), strict=True):
            torch.mm(p, q.T, out=_matrix(x, m))
        start = self.num_left
        for s in self.rest:
            x[s] = left[start : start + s.stop - s.start]
            start += s.stop - s.start
        return x

    def continue_from(self, right: Tensor) -> None:
        """Start the next step from these Q. A zero Q becomes unit vectors."""
        self.basis = right.clone()
        for q in self._rights(self.basis):
            q.copy_(torch.linalg.qr(q).Q)

    def _lefts(self, left: Tensor) -> Iterator[Tensor]:
        return _views(left, [(m.rows, m.rank) for m in self.matrices])

    def _rights(self, right: Tensor) -> Iterator[Tensor]:
        return _views(right, [(m.columns, m.rank) for m in self.matrices])


def _views(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    start = 0
    for height, width in shapes:
        yield flat[start : start + height * width].view(height, width)
        start += height * width


def _matrix(x: Tensor, m: ParameterMatrix) -> Tensor:
    return x[m.start : m.stop].view(m.rows, m.columns)


def _partition(
    rank: int, shapes: Sequence[tuple[int, Sequence[int]]]
) -> tuple[list[ParameterMatrix], list[slice]]:
    """What is sent as factors, and what is sent uncompressed."""
    matrices = []
    rest = []
    for start, shape in shapes:
        numel = torch.Size(shape).numel()
        rows = shape[0] if len(shape) > 1 else 1
        columns = numel // max(1, rows)
        r = min(rank, rows, columns)
        if r * (rows + columns) < numel:
            matrices.append(ParameterMatrix(start, rows, columns, r))
        else:
            rest.append(slice(start, start + numel))
    return matrices, rest


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

    def layout(self, numel: int) -> Layout:
        count = self.count(numel)
        return [(count, torch.int16), (count, torch.bfloat16)]

    def encode(self, x: Tensor) -> Sequence[Tensor]:
        end = x.numel() // BLOCK * BLOCK
        indices = []
        values = []
        for rows in (x[:end].view(-1, BLOCK), x[end:].view(1, -1)):
            where = rows.abs().topk(self._of_block(rows.shape[1]), sorted=False).indices
            indices.append((where - _HALF).to(torch.int16).view(-1))
            values.append(rows.gather(1, where).bfloat16().view(-1))
        return [*indices, *values]

    def decode(self, tensors: list[Tensor], numel: int) -> Tensor:
        indices, values = tensors
        full, rest = divmod(numel, BLOCK)
        where = indices.long() + _HALF
        in_full = full * self._of_block(BLOCK)
        if len(where) > in_full and int(where[in_full:].max()) >= rest:
            raise ShoalError(f"a topk message is damaged: it has an index outside of {numel}")
        starts = torch.arange(full, device=where.device) * BLOCK
        where[:in_full] += starts.repeat_interleave(self._of_block(BLOCK))
        where[in_full:] += full * BLOCK
        x = torch.zeros(numel, device=where.device)
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

    def layout(self, numel: int) -> Layout:
        chunks = -(-numel // CHUNK)
        return [(1, torch.int32), (chunks, torch.bfloat16), (chunks * CHUNK // 8, torch.uint8)]

    def encode(self, x: Tensor) -> Sequence[Tensor]:
        x = x.float()
        seed = x.sum().view(1).view(torch.int32)
        rotated = _transform(to_chunks(x, CHUNK) * _random_signs(seed))
        scales = rotated.abs().mean(1).bfloat16()
        bits = (rotated >= 0).view(-1, 8) * _weights(x.device)
        signs = bits.sum(1, dtype=torch.uint8)
        return seed, scales, signs

    def decode(self, tensors: list[Tensor], numel: int) -> Tensor:
        seed, scales, signs = tensors
        bits = signs.unsqueeze(1).bitwise_and(_weights(signs.device)).ne(0).view(-1, CHUNK)
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


class ScaledIntegers(Compressor):
    """Whole numbers of a few bits, times a scale of each chunk of elements.

    Numbers of 4 bits lie two in a byte: n/2 + n/32 bytes with a scale in bf16 for 64 elements.
    """

    def __init__(self, bits: int, chunk: int, scale: torch.dtype):
        self.bits = bits
        self.chunk = chunk
        self.scale = scale
        self.most = 2 ** (bits - 1) - 1

    def layout(self, numel: int) -> Layout:
        return [(-(-numel // self.chunk), self.scale), (-(-numel * self.bits // 8), torch.int8)]

    def encode(self, x: Tensor) -> Sequence[Tensor]:
        chunks = to_chunks(x.float(), self.chunk)
        scales = (chunks.abs().amax(1) / self.most).to(self.scale)
        divisors = scales.float().clamp(min=torch.finfo(torch.float32).tiny)
        steps = (chunks / divisors.unsqueeze(1)).round_().clamp_(-self.most, self.most)
        numbers = steps.to(torch.int8).view(-1)[: x.numel()]
        if self.bits == 4:
            low, high = to_chunks(numbers + 8, 2).view(torch.uint8).unbind(1)
            numbers = low + 16 * high
        return scales, numbers

    def decode(self, tensors: list[Tensor], numel: int) -> Tensor:
        scales, numbers = tensors
        if self.bits == 4:
            pairs = numbers.view(torch.uint8)
            numbers = torch.stack([pairs % 16, pairs // 16], 1).view(torch.int8).view(-1) - 8
        chunks = to_chunks(numbers[:numel].float(), self.chunk) * scales.float().unsqueeze(1)
        return chunks.view(-1)[:numel]


class Bf16(Compressor):
    """8 bits of precision, the range of float32: 2n bytes."""

    def layout(self, numel: int) -> Layout:
        return [(numel, torch.bfloat16)]

    def encode(self, x: Tensor) -> Sequence[Tensor]:
        return (x.bfloat16(),)

    def decode(self, tensors: list[Tensor], numel: int) -> Tensor:
        return tensors[0].float()


class Fp16(Compressor):
    """11 bits of precision: 2n + 4 bytes.

    A power of two scales the largest element to the upper end of fp16: nothing overflows, and an
    element 2^-29 times as large still has full precision. The scale is sent along.
    """

    def layout(self, numel: int) -> Layout:
        return [(1, torch.float32), (numel, torch.float16)]

    def encode(self, x: Tensor) -> Sequence[Tensor]:
        x = x.float()
        largest = torch.linalg.vector_norm(x, torch.inf).view(1)
        exponent = torch.frexp(largest).exponent.clamp(min=-100) - 15
        scale = torch.ldexp(torch.ones_like(largest), exponent)
        return scale, (x / scale).half()

    def decode(self, tensors: list[Tensor], numel: int) -> Tensor:
        scale, values = tensors
        return values.float() * scale


def make_compressor(
    text: str, shapes: Sequence[tuple[int, Sequence[int]]], numel: int
) -> Compressor:
    """The compressor of flat tensors of `numel` elements.

    `shapes` are the parameters in them: where each begins, and its shape.
    """
    name, settings = read_setting(text)
    if name in _PLAIN:
        return _PLAIN[name]()
    if name == "topk":
        return TopK(settings[""])
    return PowerSgd(int(settings["rank"]), shapes, numel)


_PLAIN: dict[str, Callable[[], Compressor]] = {
    "fp16": Fp16,
    "bf16": Bf16,
    "int8": partial(ScaledIntegers, 8, 256, torch.float32),
    "int4": partial(ScaledIntegers, 4, 64, torch.bfloat16),
    "onebit": OneBit,
}
