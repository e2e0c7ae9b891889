"""PowerSGD: matrices as products of two thin ones, by one step of power iteration.

    M (n x m)  ~  P (n x r) · Qᵗ (r x m)        P = orthogonal(M·Q),  Q = Mᵗ·P

Q starts from that of the previous step, orthogonalised, so the iteration continues over steps.
Parameters that are no matrices, or would not get smaller, are sent uncompressed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compress import Compressor, join, split


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
    """Rank-r factors of the matrices in a flat tensor, and the rest of it uncompressed.

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

    def num_bytes(self, numel: int) -> int:
        return 4 * (self.num_left + self.num_right + self.num_rest)

    def pack(self, x: Tensor) -> Tensor:
        left = self.project(x)
        self.orthogonalise(left)
        right = self.correlate(x, left)
        self.continue_from(right)
        return join([left, right], self.num_bytes(x.numel()))

    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        layout = [(self.num_left + self.num_rest, torch.float32), (self.num_right, torch.float32)]
        left, right = split(payload, layout, self.num_bytes(numel))
        return self.expand(left, right)

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
        start = 0
        for m in self.matrices:
            yield left[start : start + m.rows * m.rank].view(m.rows, m.rank)
            start += m.rows * m.rank

    def _rights(self, right: Tensor) -> Iterator[Tensor]:
        start = 0
        for m in self.matrices:
            yield right[start : start + m.columns * m.rank].view(m.columns, m.rank)
            start += m.columns * m.rank


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
