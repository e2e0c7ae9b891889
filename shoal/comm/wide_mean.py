"""A mean of small integers, whose sum does not fit their type: 100 + 100 in 8 bits is -56.

The sum is formed in 64 bits, divided there and stored in the type of the numbers. The native
collectives do so themselves; the other executors are given copies. The sum of 64-bit integers has
to fit 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.call import Call, Op, Operand


class WidenedCall(NamedTuple):
    """A call whose sums do not wrap; `store` brings its result to the caller's tensors."""

    call: Call
    store: Callable[[], None]


def widened(call: Call, rank: int) -> WidenedCall:
    """The call itself, unless it is a mean of integers of fewer than 64 bits."""
    if call.op is not Op.MEAN or not _is_small_integer(call.data):
        return WidenedCall(call, _nothing)
    given = call.data
    taken = call.out
    assert given is not None and isinstance(taken, Tensor)
    data = _wide(given)
    out = data if taken is given else torch.empty_like(taken, dtype=torch.int64)
    assert isinstance(out, Tensor)

    def store() -> None:
        taken.detach().copy_(out)

    is_kept = call.kind == "reduce" and rank != call.root
    return WidenedCall(call._replace(data=data, out=out), _nothing if is_kept else store)


def _is_small_integer(operand: Operand | None) -> bool:
    assert operand is not None
    dtype = operand.dtype if isinstance(operand, Tensor) else operand[0].dtype
    return not (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize < 8


def _wide(operand: Operand) -> Operand:
    if isinstance(operand, Tensor):
        return operand.detach().long()
    return [piece.detach().long() for piece in operand]


def _nothing() -> None:
    return None
