"""A collective call as data, and the one table of operators and number types.

A number type is reduced as a type that every executor knows:

    bool                    bytes 0 and 1: sum, max and "or" are max; prod, min and "and" are min
    complex64, complex128   pairs of real numbers; they can be summed and averaged
    all others              as they are
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.transport.shm.flight_recorder import DTYPES, KINDS, OPS
from shoal.errors import BadInput

# one tensor, or a list of tensors that are its pieces in the order of ranks
Operand = Tensor | list[Tensor]


class Op(enum.Enum):
    """How contributions are combined. `code` is its number in the native collectives."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    PROD = "prod"
    AND = "and"
    OR = "or"
    XOR = "xor"

    code: int
    is_bitwise: bool

    def __init__(self, word: str):
        self.code = OPS.index(word)
        self.is_bitwise = word in ("and", "or", "xor")

    def combine(self, into: Tensor, other: Tensor) -> None:
        """`into` = `into` (op) `other`; a mean is summed here and divided at the end."""
        if self is Op.SUM or self is Op.MEAN:
            into.add_(other)
        elif self is Op.PROD:
            into.mul_(other)
        else:
            _COMBINE[self](into, other, out=into)


_COMBINE: dict[Op, Any] = {
    Op.MAX: torch.maximum,
    Op.MIN: torch.minimum,
    Op.AND: torch.bitwise_and,
    Op.OR: torch.bitwise_or,
    Op.XOR: torch.bitwise_xor,
}

TORCH_OPS = {
    Op.SUM: dist.ReduceOp.SUM,
    Op.MEAN: dist.ReduceOp.SUM,  # Gloo has no average: divided when the work is done
    Op.MAX: dist.ReduceOp.MAX,
    Op.MIN: dist.ReduceOp.MIN,
    Op.PROD: dist.ReduceOp.PRODUCT,
    Op.AND: dist.ReduceOp.BAND,
    Op.OR: dist.ReduceOp.BOR,
    Op.XOR: dist.ReduceOp.BXOR,
}


class PeerMessage(NamedTuple):
    """One end of a message between two ranks: what goes to `peer`, or where what it sends comes."""

    data: Tensor
    peer: int
    tag: int = 0


class Call(NamedTuple):
    """One call of one collective on one rank; its arguments have been checked by `Group`.

    `data` goes in and `out` comes out; where a tensor is changed in place both are the same one.
    A rank that has no input or no output has None. The counts are those of `all_to_all_uneven`.
    """

    kind: str
    data: Operand | None = None
    out: Operand | None = None
    op: Op = Op.SUM
    root: int = 0
    recv_counts: tuple[int, ...] = ()
    send_counts: tuple[int, ...] = ()
    timeout_s: float | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the larger operand."""
        return max(num_bytes(self.data), num_bytes(self.out))


def num_bytes(operand: Operand | None) -> int:
    if operand is None:
        return 0
    if isinstance(operand, Tensor):
        return operand.nbytes
    return sum(piece.nbytes for piece in operand)


# ---------------------------------------------------------------------- codes of the native part

KIND_CODES = {kind: code for code, kind in enumerate(KINDS)}
KIND_CODES["all_to_all_uneven"] = len(KINDS) - 1
# number types that the native collectives reduce
DTYPE_CODES = {getattr(torch, name): code for code, name in enumerate(DTYPES) if code > 0}
DTYPE_CODES[torch.uint8] = 0
# types that are only moved travel as bytes or as integers of their size
_CODES_BY_SIZE = {1: 0, 2: 2, 4: 3, 8: 4, 16: 4}


class NativeType(NamedTuple):
    """One element is `width` numbers of the type `code`."""

    code: int
    width: int
    op: int = 0


def moved_as(dtype: torch.dtype) -> NativeType:
    """For operations that only move data."""
    code = DTYPE_CODES.get(dtype)
    if code is not None:
        return NativeType(code, 1)
    return NativeType(_CODES_BY_SIZE[dtype.itemsize], 2 if dtype.itemsize == 16 else 1)


def reduced_natively(dtype: torch.dtype, op: Op) -> NativeType:
    reduced = reduced_as(dtype, op)
    code = DTYPE_CODES.get(reduced.dtype)
    if code is None:
        raise BadInput(f"shared memory has no {op.value} of {dtype}")
    return NativeType(code, reduced.width, reduced.op.code)


# ---------------------------------------------------------------------- operators on number types

_BOOL_OPS = {
    Op.SUM: Op.MAX,
    Op.OR: Op.MAX,
    Op.MAX: Op.MAX,
    Op.PROD: Op.MIN,
    Op.AND: Op.MIN,
    Op.MIN: Op.MIN,
    Op.XOR: Op.XOR,
}
_REAL_OF = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class ReducedType(NamedTuple):
    """One element is reduced as `width` numbers of `dtype` with `op`."""

    dtype: torch.dtype
    width: int
    op: Op


def check_reducible(dtype: torch.dtype, op: Op) -> None:
    """Raise where `op` has no meaning for numbers of this type."""
    if op is Op.SUM:
        return
    if dtype == torch.bool and op is Op.MEAN:
        raise BadInput("truth values have no mean: use max (any), min (all) or a number type")
    if dtype.is_complex and op is not Op.MEAN:
        raise BadInput(f"complex numbers have no {op.value}: they can be summed and averaged")
    if op.is_bitwise and dtype.is_floating_point:
        raise BadInput(f"{dtype} has no bitwise {op.value}: use integers or truth values")


def reduced_as(dtype: torch.dtype, op: Op) -> ReducedType:
    if dtype == torch.bool:
        return ReducedType(torch.uint8, 1, _BOOL_OPS[op])
    if dtype in _REAL_OF:
        return ReducedType(_REAL_OF[dtype], 2, op)
    return ReducedType(dtype, 1, op)


def as_reduced(flat: Tensor, op: Op) -> tuple[Tensor, Op]:
    """The same memory as numbers that every backend reduces, and the operator for them."""
    reduced = reduced_as(flat.dtype, op)
    if flat.is_complex():
        return torch.view_as_real(flat).view(-1), reduced.op
    if reduced.dtype == flat.dtype:  # `shoal verify` widens types that torch functions are given
        return flat, reduced.op
    return flat.view(reduced.dtype), reduced.op


def divide(total: Tensor, count: int) -> None:
    """The last step of a mean; integers are rounded towards zero."""
    if total.dtype.is_floating_point or total.dtype.is_complex:
        total.div_(count)
    else:
        # a count above 127 does not fit 8 bits
        total.copy_(total.long().div_(count, rounding_mode="trunc"))


def fill_identity(into: Tensor, op: Op) -> None:
    """The value of an empty sum, product, maximum or minimum."""
    into.fill_(_identity(op, into.dtype))


def _identity(op: Op, dtype: torch.dtype) -> float | int | bool:
    if op in (Op.SUM, Op.MEAN, Op.OR, Op.XOR):
        return 0
    if op is Op.PROD:
        return 1
    if dtype == torch.bool:
        return op in (Op.MIN, Op.AND)
    if op is Op.AND:  # all bits set
        return torch.iinfo(dtype).max if torch.iinfo(dtype).min == 0 else -1
    if dtype.is_floating_point:
        return float("inf") if op is Op.MIN else float("-inf")
    limits = torch.iinfo(dtype)
    return limits.max if op is Op.MIN else limits.min


def sent_bytes(call: Call, rank: int, size: int) -> int:
    """What `rank` of `size` sends for a call, by the schedule that sends the least."""
    given = num_bytes(call.data)
    match call.kind:
        case "all_reduce":
            return all_reduce_bytes(given, size)
        case "broadcast" | "scan" | "exclusive_scan":
            # in a chain from the root every rank but the last sends once
            return given if (rank - call.root) % size < size - 1 else 0
        case "reduce" | "gather":
            return given if rank != call.root else 0
        case "scatter":
            return num_bytes(call.out) * (size - 1) if rank == call.root else 0
        case "all_gather":
            return given * (size - 1)
        case "reduce_scatter":
            return num_bytes(call.out) * (size - 1)
        case "all_to_all":
            return given // size * (size - 1)
        case "all_to_all_uneven":
            assert isinstance(call.data, Tensor)
            return given - call.send_counts[rank] * call.data.element_size()
    return 0


def all_reduce_bytes(num_bytes: int, size: int) -> int:
    """What a rank of `size` sends in an all-reduce of `num_bytes`."""
    return round(2 * num_bytes * (size - 1) / size)
