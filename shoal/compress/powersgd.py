"""Matrices as products of two thin ones, found by a step of power iteration.

    M (n x m)  ~  P (n x r) · Qᵗ (r x m)        P = orthogonal(M·Q),  Q = Mᵗ·P

Q starts from the one of the step before, orthogonalised, so the iteration goes on from step to
step. What is no matrix, or would not get smaller, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compress.compressor import Compressor, join, split


@dataclass(frozen=True)
class Matrix:
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
        self.matrices, self.rest = _sort(rank, shapes)
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
        self.go_on_from(right)
        return join([left, right], self.num_bytes(x.numel()))

    def unpack(self, payload: Tensor, numel: int) -> Tensor:
        parts = [(self.num_left + self.num_rest, torch.float32), (self.num_right, torch.float32)]
        left, right = split(payload, parts, self.num_bytes(numel))
        return self.expand(left, right)

    # The steps of it. `left` holds every P and then the rest; `right` every Q.

    def project(self, x: Tensor) -> Tensor:
        """M·Q of every matrix, and the rest: linear in x, so sums of it are those of the sum."""
        x, bases = x.float(), self._rights(self.basis.to(x.device))
        parts = [
            (_matrix(x, m) @ basis).view(-1) for m, basis in zip(self.matrices, bases, strict=True)
        ]
        return torch.cat([*parts, *(x[s] for s in self.rest)])

    def orthogonalise(self, left: Tensor) -> None:
        """Make the columns of every P orthogonal, in place."""
        for p in self._lefts(left):
            p.copy_(torch.linalg.qr(p).Q)

    def correlate(self, x: Tensor, left: Tensor) -> Tensor:
        """Mᵗ·P of every matrix; linear in x as well."""
        x = x.float()
        parts = [
            (_matrix(x, m).T @ p).reshape(-1)
            for m, p in zip(self.matrices, self._lefts(left), strict=True)
        ]
        return torch.cat(parts) if parts else x.new_zeros(0)

    def expand(self, left: Tensor, right: Tensor) -> Tensor:
        """P·Qᵗ of every matrix and the rest, at their places."""
        x = left.new_zeros(self.numel)
        for m, p, q in zip(self.matrices, self._lefts(left), self._rights(right), strict=True):
            torch.mm(p, q.T, out=_matrix(x, m))
        start = self.num_left
        for s in self.rest:
            x[s] = left[start : start + s.stop - s.start]
            start += s.stop - s.start
        return x

    def go_on_from(self, right: Tensor) -> None:
        """Start the next step from these Q. A zero one becomes unit vectors, never stays zero."""
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


def _matrix(x: Tensor, m: Matrix) -> Tensor:
    return x[m.start : m.stop].view(m.rows, m.columns)


def _sort(
    rank: int, shapes: Sequence[tuple[int, Sequence[int]]]
) -> tuple[list[Matrix], list[slice]]:
    """What is sent as factors, and what as it is."""
    matrices = []
    rest = []
    for start, shape in shapes:
        numel = torch.Size(shape).numel()
        rows = shape[0] if len(shape) > 1 else 1
        columns = numel // max(1, rows)
        r = min(rank, rows, columns)
        if r * (rows + columns) < numel:
            matrices.append(Matrix(start, rows, columns, r))
        else:
            rest.append(slice(start, start + numel))
    return matrices, rest
