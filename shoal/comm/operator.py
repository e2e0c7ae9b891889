"""What the operators mean for the different types of numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.group import Op
from shoal.errors import BadInput


def check_operator(op: Op, dtype: torch.dtype) -> None:
    if dtype == torch.bool and op is Op.MEAN:
        raise BadInput("truth values have no mean: use max (any), min (all) or a number type")


def divide(total: Tensor, count: int) -> None:
    """A mean's last step; whole numbers are rounded towards zero."""
    if total.dtype.is_floating_point or total.dtype.is_complex:
        total.div_(count)
    else:
        total.div_(count, rounding_mode="trunc")


def fill_identity(into: Tensor, op: Op) -> None:
    """What an empty sum, product, maximum or minimum is."""
    into.fill_(_identity(op, into.dtype))


def _identity(op: Op, dtype: torch.dtype) -> float | int | bool:
    if op in (Op.SUM, Op.MEAN):
        return 0
    if op is Op.PROD:
        return 1
    if dtype == torch.bool:
        return op is Op.MIN
    if dtype.is_floating_point:
        return float("inf") if op is Op.MIN else float("-inf")
    limits = torch.iinfo(dtype)
    return limits.max if op is Op.MIN else limits.min
