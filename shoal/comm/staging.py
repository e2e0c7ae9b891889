"""Operands as flat contiguous tensors, on their device or in the host's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.call import Operand


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
        self.flat = tensor.contiguous().view(-1)

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
