"""Optimizer state between the whole model of a worker and the slices of the servers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.server.model.named_optimizer import Option, options_of
from shoal.server.model.shard import NAMES
from shoal.server.protocol.messages import ModelSpec, ShardState, StateTensor


def cut_state(
    optimizer: torch.optim.Optimizer | None,
    params: Sequence[nn.Parameter],
    spec: ModelSpec,
    steps: int,
) -> tuple[ShardState, list[Tensor]]:
    """One server's part of an optimizer's state; rows of a tensor that is cut by rows."""
    values = []
    tensors = []
    numbers = []
    for i, cut in enumerate(spec.slices):
        p = params[cut.parameter]
        for key, value in (optimizer.state.get(p, {}) if optimizer else {}).items():
            if isinstance(value, Tensor):
                part = value
                if value.shape == p.shape and tuple(value.shape) != cut.shape:
                    part = value[cut.first_row : cut.first_row + cut.shape[0]]
                part = part.detach().cpu().contiguous()
                values.append(StateTensor(i, key, NAMES[part.dtype], tuple(part.shape)))  # type: ignore[arg-type]
                tensors.append(part)
            elif value is None or isinstance(value, (bool, int, float)):
                numbers.append((i, key, value))
    return ShardState(steps, tuple(values), tuple(numbers), options=_options(optimizer)), tensors


def whole_state(
    optimizer: torch.optim.Optimizer,
    params: Sequence[nn.Parameter],
    specs: Sequence[ModelSpec],
    states: Sequence[tuple[ShardState, list[Tensor]]],
) -> None:
    """Put the parts of all servers together into the optimizer of a worker."""
    optimizer.state.clear()
    for spec, (state, tensors) in zip(specs, states, strict=True):
        for value, tensor in zip(state.tensors, tensors, strict=True):
            cut = spec.slices[value.slice]
            p = params[cut.parameter]
            held = optimizer.state[p]
            if value.shape != cut.shape or cut.shape == tuple(p.shape):
                held[value.key] = tensor
                continue
            if value.key not in held:
                held[value.key] = torch.zeros(p.shape, dtype=tensor.dtype)
            held[value.key][cut.first_row : cut.first_row + cut.shape[0]] = tensor
        for i, key, number in state.numbers:
            optimizer.state[params[spec.slices[i].parameter]][key] = number


def _options(optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Option], ...]:
    """The numbers of each parameter group, which a checkpoint may have changed."""
    if optimizer is None:
        return ()
    return tuple(
        {
            key: value
            for key, value in options_of(optimizer, group).items()
            if isinstance(value, (int, float, tuple)) and not isinstance(value, bool)
        }
        for group in optimizer.param_groups
    )
