"""What every worker holds alike where the strategy shards the training state.

Buffers, frozen parameters, averages, and the numbers of steps: a newcomer gets them whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.train.ema import Ema
from shoal.train.step import Step


def pack_unsharded(models: Sequence[Step], emas: Sequence[Ema], steps: int) -> dict[str, Any]:
    """For another worker of the same script."""
    return {
        "steps": steps,
        "models": [{"steps": step.steps, "tensors": _unsharded_tensors(step)} for step in models],
        "averages": [ema.averages for ema in emas],
    }


def unpack_unsharded(state: dict[str, Any], models: Sequence[Step], emas: Sequence[Ema]) -> int:
    """Take what another worker has packed; returns the steps of its job."""
    for step, of_model in zip(models, state["models"], strict=True):
        _copy(_unsharded_tensors(step), of_model["tensors"])
        step.steps = step.update.steps = of_model["steps"]
    for ema, averages in zip(emas, state["averages"], strict=True):
        _copy(dict(enumerate(ema.averages)), dict(enumerate(averages)))
    return int(state["steps"])


def _unsharded_tensors(step: Step) -> dict[str, Tensor]:
    trained = {id(p) for p in step.flat.params}
    frozen = {name: p.detach() for name, p in step.model.named_parameters() if id(p) not in trained}
    return {**frozen, **dict(step.model.named_buffers())}


def _copy(targets: dict[Any, Tensor], values: dict[Any, Tensor]) -> None:
    with torch.no_grad():
        for name, target in targets.items():
            value = values.get(name)
            if value is None or value.shape != target.shape or value.dtype != target.dtype:
                raise ShoalError(f"another worker trains another model: {name} is not the same")
            target.copy_(value)
