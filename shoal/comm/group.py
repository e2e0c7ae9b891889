"""What a group of ranks can do together. Every operation returns Work; `wait` finishes it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import BadInput
from shoal.transport.transport import Work


class Op(enum.Enum):
    """How contributions are combined."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    PROD = "prod"

    def combine(self, into: Tensor, other: Tensor) -> None:
        """`into` = `into` (op) `other`; a mean is added up here and divided at the end."""
        if self is Op.MAX:
            torch.maximum(into, other, out=into)
        elif self is Op.MIN:
            torch.minimum(into, other, out=into)
        elif self is Op.PROD:
            into.mul_(other)
        else:
            into.add_(other)


class Group(Protocol):
    """Ranks 0..size-1 of one axis. All ranks call the same collectives in the same order.

    Tensors are changed in place unless an `out` is named. In the flat collectives `out` (or
    `data`) holds the pieces of rank 0, 1, … one after the other.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def send(self, data: Tensor, dst: int, tag: int = 0) -> Work: ...
    def recv(self, into: Tensor, src: int, tag: int = 0) -> Work: ...
    def broadcast(self, data: Tensor, root: int = 0) -> Work: ...
    def reduce(self, data: Tensor, root: int = 0, op: Op = Op.SUM) -> Work: ...
    def all_reduce(self, data: Tensor, op: Op = Op.SUM) -> Work: ...
    def gather(self, out: Tensor | None, data: Tensor, root: int = 0) -> Work: ...
    def scatter(self, out: Tensor, data: Tensor | None, root: int = 0) -> Work: ...
    def all_gather(self, out: Tensor, data: Tensor) -> Work: ...
    def reduce_scatter(self, out: Tensor, data: Tensor, op: Op = Op.SUM) -> Work: ...
    def all_to_all(self, out: Tensor, data: Tensor) -> Work: ...
    def scan(self, data: Tensor, op: Op = Op.SUM) -> Work: ...
    def barrier(self) -> Work: ...
    def duplicate(self) -> Group:
        """The same ranks with an order of operations of their own; all ranks call it."""
        ...

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """The group of some of these ranks, in that order; None for a rank that is not in it.

        All ranks call it, in the same order, as with `duplicate`.
        """
        ...


def check_subgroup(ranks: Sequence[int], size: int) -> None:
    if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(size)):
        raise BadInput(f"a subgroup needs different ranks below {size}, not {list(ranks)}")


def check_root(root: int, size: int) -> None:
    if not 0 <= root < size:
        raise BadInput(f"the root must be one of the ranks 0 to {size - 1}, not {root}")


def check_pieces(kind: str, whole: Tensor, piece: Tensor, size: int) -> None:
    """The whole has to hold a piece of each rank."""
    if whole.numel() != piece.numel() * size or whole.dtype != piece.dtype:
        raise BadInput(
            f"{kind} over {size} ranks with pieces of {piece.numel()} {piece.dtype} needs a whole "
            f"of {piece.numel() * size}, not of {whole.numel()} {whole.dtype}"
        )


def check_all_to_all(out: Tensor, data: Tensor, size: int) -> None:
    if out.numel() != data.numel() or data.numel() % size:
        raise BadInput(
            f"all_to_all over {size} ranks needs `out` and `data` of one size that {size} divides, "
            f"not {out.numel()} and {data.numel()} elements"
        )
