"""Weights and optimizer state of a shard, for checkpoints and snapshots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.server.messages import ShardState, StateTensor
from shoal.server.model.expected_state import Form, expected_state, misfit
from shoal.server.model.shard import DTYPES, NAMES, Shard
from shoal.server.protocol import Refused

_MAX_STATE_TENSORS = 16  # of an optimizer, for one parameter


def get_state(shard: Shard, steps: int) -> tuple[ShardState, list[Tensor]]:
    """The optimizer's state, by parameter slice."""
    specs = []
    tensors = []
    numbers = []
    for i, p in enumerate(shard.params):
        entries = shard.optimizer.state.get(p, {}) if shard.optimizer is not None else {}
        for key, value in entries.items():
            if isinstance(value, Tensor):
                specs.append(StateTensor(i, key, NAMES[value.dtype], tuple(value.shape)))
                tensors.append(value.detach().cpu().contiguous())
            elif value is None or isinstance(value, (bool, int, float)):
                numbers.append((i, key, value))
    return ShardState(steps, tuple(specs), tuple(numbers), weights=False), tensors


def check_state(shard: Shard, state: ShardState) -> int:
    """The bytes of its payload; Refused if a tensor does not fit its parameter slice."""
    total = shard.size * shard.dtype.itemsize if state.weights else 0
    if len(state.tensors) > _MAX_STATE_TENSORS * len(shard.params):
        raise Refused(f"{len(state.tensors)} tensors of state for {len(shard.params)} parameters")
    for tensor in state.tensors:
        if tensor.slice >= len(shard.params):
            raise Refused(f"state of slice {tensor.slice}, which is not held here")
        total += math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
    if any(i >= len(shard.params) for i, _, _ in state.numbers):
        raise Refused("state of a slice that is not held here")
    if shard.optimizer is not None:
        _check_forms(shard, shard.optimizer, state)
    elif state.tensors or state.numbers:
        raise Refused("optimizer state for a server without an optimizer")
    return total


def _check_forms(shard: Shard, optimizer: torch.optim.Optimizer, state: ShardState) -> None:
    """Of each slice the optimizer needs all of its tensors, or none; fused ones trust the sizes."""
    expected = expected_state(optimizer, _groups(optimizer.param_groups, state))
    found: dict[int, set[str]] = {}
    for tensor in state.tensors:
        p = shard.params[tensor.slice]
        forms = None if expected is None else expected.get(p, {})
        form = Form(tensor.shape, DTYPES[tensor.dtype])
        if problem := misfit(tensor.key, form, p, forms):
            raise Refused(f"state of slice {tensor.slice} does not fit its parameter: {problem}")
        found.setdefault(tensor.slice, set()).add(tensor.key)
    for i, keys in found.items():
        needed = set() if expected is None else set(expected.get(shard.params[i], {}))
        if needed - keys:
            raise Refused(f"state of slice {i} lacks {', '.join(sorted(needed - keys))}")
    for i, key, _ in state.numbers:
        if key in found.get(i, ()) or (expected and key in expected.get(shard.params[i], {})):
            raise Refused(f"state {key!r} of slice {i} is a number, and a tensor is needed")


def _groups(groups: list[dict[str, Any]], state: ShardState) -> list[dict[str, Any]]:
    """These parameter groups as they will be with the options of `state`."""
    groups = [dict(group) for group in groups]
    for group, options in zip(groups, state.options, strict=False):
        group.update({k: v for k, v in options.items() if k in group and k != "params"})
    return groups


def restore(shard: Shard, state: ShardState, payload: bytearray) -> None:
    """Replace weights and optimizer state; `check_state` has accepted them."""
    flat = torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.empty(0)
    weight_bytes = shard.size * shard.dtype.itemsize if state.weights else 0
    if weight_bytes:
        shard.data.copy_(flat[:weight_bytes].view(shard.dtype))
    load_optimizer(shard, state, read_tensors(state, flat, weight_bytes))


def load_optimizer(shard: Shard, state: ShardState, tensors: Sequence[Tensor]) -> None:
    """Replace the optimizer state by tensors that may be kept, as `get_state` describes them."""
    optimizer = shard.optimizer
    if optimizer is None:
        return
    entries: dict[int, dict[str, Any]] = {}
    for spec, tensor in zip(state.tensors, tensors, strict=True):
        entries.setdefault(spec.slice, {})[spec.key] = tensor
    for i, key, number in state.numbers:
        entries.setdefault(i, {})[key] = number
    document = optimizer.state_dict()  # it numbers parameters in the order of groups
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    places = {id(p): place for place, p in enumerate(ordered)}
    document["state"] = {places[id(shard.params[i])]: values for i, values in entries.items()}
    document["param_groups"] = _groups(document["param_groups"], state)
    optimizer.load_state_dict(document)


def read_tensors(state: ShardState, flat: Tensor, offset: int = 0) -> list[Tensor]:
    """The tensors of a payload of bytes, from `offset` on. Copies: they may be unaligned there."""
    tensors = []
    for spec in state.tensors:
        dtype = DTYPES[spec.dtype]
        end = offset + math.prod(spec.shape) * dtype.itemsize
        tensors.append(flat[offset:end].clone().view(dtype).reshape(spec.shape))
        offset = end
    return tensors
