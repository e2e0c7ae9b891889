"""Operands as flat contiguous tensors, on their device or in the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.call import Call, Op, Operand
from shoal.errors import BadInput


class FlatTensor:
    """An operand as one flat tensor: a view where that is possible, else a copy.

    `store` brings back what has changed in a copy. With `host` the flat tensor is on the CPU.
    With `copy` it is a copy in any case.
    """

    __slots__ = ("_operand", "flat")

    def __init__(self, operand: Operand, copy: bool = False, host: bool = False):
        self._operand = operand
        if isinstance(operand, Tensor):
            tensor = operand.detach()
            if host and not tensor.is_cpu:
                tensor = tensor.cpu()
            elif copy:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
        else:
            tensor = torch.cat([piece.detach().reshape(-1) for piece in operand])
            tensor = tensor.cpu() if host else tensor
        # an empty tensor may have strides that do not fit other number types
        self.flat = tensor.contiguous().view(-1) if tensor.numel() else tensor.new_empty(0)

    def rows(self, size: int) -> Tensor:
        """The piece of each rank as a row."""
        return self.flat.view(size, self.flat.numel() // size)

    def store(self) -> None:
        operand = self._operand
        if not isinstance(operand, Tensor):
            start = 0
            for piece in operand:
                end = start + piece.numel()
                piece.detach().copy_(self.flat[start:end].view(piece.shape))
                start = end
        elif self.flat.data_ptr() != operand.data_ptr():
            operand.detach().copy_(self.flat.view(operand.shape))


def on_host(operand: Operand, copy: bool = False) -> FlatTensor:
    return FlatTensor(operand, copy, host=True)


def share_storage(one: Tensor, other: Tensor) -> bool:
    """Whether both are views of one storage, so that writing one may change the other."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


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


def counts_row(call: Call) -> Tensor:
    """What one rank says about its pieces."""
    assert isinstance(call.data, Tensor)
    return torch.tensor([call.data.element_size(), *call.send_counts, *call.recv_counts])


def counts_table(size: int) -> Tensor:
    """Where the rows of all ranks are gathered."""
    return torch.empty(size, 1 + 2 * size, dtype=torch.int64)


def check_counts(table: Tensor) -> None:
    """Raise where a rank sends another piece than the rank that receives it expects."""
    size = len(table)
    width = table[:, 0]
    sent = table[:, 1 : 1 + size]
    expected = table[:, 1 + size :].t()  # [source, destination], as `sent`
    differ = (sent * width.view(-1, 1) != expected * width).nonzero()
    if len(differ):
        source, target = differ[0].tolist()
        gives = _in_words(int(sent[source, target]), int(width[source]))
        takes = _in_words(int(expected[source, target]), int(width[target]))
        raise BadInput(
            f"all_to_all_uneven over {size} ranks: rank {source} sends {gives} to rank {target}, "
            f"which expects {takes} from it: send_counts[{target}] of rank {source} and "
            f"recv_counts[{source}] of rank {target} must be equal"
        )


def _in_words(count: int, width: int) -> str:
    return f"{count} element{'s' * (count != 1)} of {width} byte{'s' * (width != 1)}"
