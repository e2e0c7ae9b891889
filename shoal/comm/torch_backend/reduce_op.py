"""The reduction that a caller of torch.distributed asks for."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from shoal.comm.call import TORCH_OPS, Op
from shoal.errors import BadInput

_OPS = [(dist.ReduceOp.AVG if op is Op.MEAN else torchs, op) for op, torchs in TORCH_OPS.items()]


def op_of(opts: Any) -> Op:
    if opts is None:
        return Op.SUM
    op = opts.reduceOp
    for known, ours in _OPS:
        if op == known:
            return ours
    raise BadInput(f"the shoal backend has no ReduceOp.{_name_of(op)}")


def _name_of(op: Any) -> str:
    """An operator that has a factor is an object without a name."""
    members = dist.ReduceOp.RedOpType.__members__
    return next((name for name, member in members.items() if op == member), str(op))
