"""Which models and optimizers a loss of the user's own loop gives gradients to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.group import Group, Op
from shoal.errors import BadInput
from shoal.train.loop_part import LoopPart


def check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise BadInput(
            f"job.backward takes a loss that is one number, the mean over samples, not {what}"
        )
    if not loss.requires_grad:
        raise BadInput("the loss of job.backward depends on no parameter that requires a gradient")


def check_parts(parts: Sequence[LoopPart], has_models: bool) -> None:
    """Raise `BadInput` if no optimizer was set up."""
    if parts:
        return
    if has_models:
        raise BadInput(
            "job.setup was given a model and no optimizer, so job.backward has nothing to reduce: "
            "make the optimizer first, and give it to job.setup with the model: model, optimizer "
            "= job.setup(model, optimizer)"
        )
    raise BadInput("job.backward comes after job.setup: there is no model yet")


def reached_parts(loss: Tensor, parts: Sequence[LoopPart], group: Group) -> Sequence[LoopPart]:
    """The parts that get gradients from this loss on any worker of `group`, which has all rows."""
    if len(parts) == 1:
        return parts
    leaves = _leaves_of(loss)
    is_reached = [part.trains and any(id(p) in leaves for p in part.params) for part in parts]
    if group.size > 1 and any(part.sync.collects or part.sums_axes for part in parts):
        device = parts[0].flat.device
        flags = torch.tensor(is_reached, dtype=torch.float32, device=device)
        group.all_reduce(flags, Op.MAX).wait()
        is_reached = [flag > 0 for flag in flags.tolist()]
    return [part for part, reached in zip(parts, is_reached, strict=True) if reached]


def _leaves_of(loss: Tensor) -> set[int]:
    """The ids of the tensors that a backward of `loss` adds gradients to."""
    leaves: set[int] = set()
    seen = {loss.grad_fn}
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None:
            continue
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return leaves
