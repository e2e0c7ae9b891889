"""Optimizer state between the model of a worker and the shards of the servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.server.model.named_optimizer import Option, options_of
from shoal.server.model.shard import NAMES
from shoal.server.protocol.messages import (
    ModelSpec,
    ParameterSlice,
    ShardState,
    StateTensor,
)

StateAndTensors = tuple[ShardState, list[Tensor]]


def shard_state(
    optimizer: torch.optim.Optimizer | None,
    params: Sequence[nn.Parameter],
    spec: ModelSpec,
    steps: int,
) -> StateAndTensors:
    """The state that one server holds; of a tensor that is split by rows, these rows."""
    values = []
    tensors = []
    numbers = []
    for index, key, value in _entries(optimizer, params, spec):
        rows = spec.slices[index]
        if isinstance(value, Tensor):
            tensor = _rows_of(value, rows, params[rows.parameter])
            dtype = NAMES[tensor.dtype]
            values.append(StateTensor(index, key, dtype, tuple(tensor.shape)))  # type: ignore[arg-type]
            tensors.append(tensor)
        elif value is None or isinstance(value, (bool, int, float)):
            numbers.append((index, key, value))
    return ShardState(steps, tuple(values), tuple(numbers), options=_options(optimizer)), tensors


def join_state(
    optimizer: torch.optim.Optimizer,
    params: Sequence[nn.Parameter],
    specs: Sequence[ModelSpec],
    states: Sequence[StateAndTensors],
) -> None:
    """Fill the optimizer of a worker with the state of all servers."""
    optimizer.state.clear()
    for spec, (state, tensors) in zip(specs, states, strict=True):
        for value, tensor in zip(state.tensors, tensors, strict=True):
            rows = spec.slices[value.slice]
            p = params[rows.parameter]
            _put(optimizer.state[p], value, tensor, rows, p)
        for index, key, number in state.numbers:
            optimizer.state[params[spec.slices[index].parameter]][key] = number


def _entries(
    optimizer: torch.optim.Optimizer | None, params: Sequence[nn.Parameter], spec: ModelSpec
) -> Iterator[tuple[int, str, Any]]:
    """Index of a slice, name and value of each entry of its optimizer state."""
    for index, rows in enumerate(spec.slices):
        state = optimizer.state.get(params[rows.parameter], {}) if optimizer else {}
        for key, value in state.items():
            yield index, key, value


def _rows_of(value: Tensor, rows: ParameterSlice, p: nn.Parameter) -> Tensor:
    if value.shape == p.shape and tuple(value.shape) != rows.shape:
        value = value[rows.first_row : rows.first_row + rows.shape[0]]
    return value.detach().cpu().contiguous()


def _put(
    state: dict[str, Any], value: StateTensor, tensor: Tensor, rows: ParameterSlice, p: nn.Parameter
) -> None:
    if value.shape != rows.shape or rows.shape == tuple(p.shape):
        state[value.key] = tensor
        return
    if value.key not in state:
        state[value.key] = torch.zeros(p.shape, dtype=tensor.dtype)
    state[value.key][rows.first_row : rows.first_row + rows.shape[0]] = tensor


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
