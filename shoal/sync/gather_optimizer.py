"""The state of sharded optimizers, gathered on rank 0 for a checkpoint.

each other rank ──▶ rank 0    {"groups": parameter groups, "names": of parameters with state}
                              the state of each of them, a pytree by itself
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.group import Group
from shoal.comm.objects import PytreeChannel
from shoal.errors import ShoalError
from shoal.pytree import map_tensors
from shoal.replica.flat.optimizers import PARAM_KEYS
from shoal.replica.flat.params import FlatParams
from shoal.sync.optimizer_step import OptimizerStep, make_optimizer

_TAG = 0
State = dict[str, Any]


def gather_optimizer(
    update: OptimizerStep, flat: FlatParams, group: Group, own: slice
) -> torch.optim.Optimizer | None:
    """On rank 0 an optimizer of all parameters with the state of all ranks; None elsewhere.

    All ranks call it, each with its `own` shard: it may also have state of others. It takes memory
    for the state of the whole model on rank 0.
    """
    channel = PytreeChannel(group, flat.device, header_device=flat.device)
    if group.rank != 0:
        _send(update, {flat.named[i][0] for i in flat.params_in(own)}, channel)
        return None
    optimizer = make_optimizer(update.factory, flat.named)
    groups = parameter_groups(update.optimizer, update.named)
    for p in update.params:
        if p in update.optimizer.state:
            optimizer.state[p] = update.optimizer.state[p]
    for peer in range(1, group.size):
        groups += _receive(optimizer, flat, channel, peer)
    take_values(optimizer, {id(p): name for name, p in flat.named}, groups)
    return optimizer


def _send(update: OptimizerStep, own: Set[str], channel: PytreeChannel) -> None:
    """Values that cannot be sent stay here."""
    names = {id(p): name for name, p in update.named if name in own}
    states = {names[id(p)]: s for p, s in update.optimizer.state.items() if id(p) in names}
    groups = parameter_groups(update.optimizer, update.named)
    header = {"groups": groups, "names": list(states)}
    channel.send(header, 0, _TAG).wait()
    for state in states.values():
        sent = {key: sendable(value) for key, value in state.items() if can_be_sent(value)}
        on_device = map_tensors(lambda t: t.detach().to(channel.device), sent)
        channel.send(on_device, 0, _TAG).wait()


def _receive(
    optimizer: torch.optim.Optimizer, flat: FlatParams, channel: PytreeChannel, peer: int
) -> list[State]:
    """Take the state of `peer` into `optimizer`; its parameter groups."""
    params = dict(flat.named)
    match channel.recv(peer, _TAG):
        case {"groups": list(groups), "names": list(names)}:
            pass
        case _:
            raise ShoalError(f"rank 0 expected optimizer state from rank {peer}, got other data")
    for name in names:
        if name not in params:
            raise ShoalError(f"rank {peer} has optimizer state of {name}, which rank 0 lacks")
        optimizer.state[params[name]] = map_tensors(Tensor.cpu, channel.recv(peer, _TAG))
    return groups


def parameter_groups(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]]
) -> list[State]:
    """The groups with names of parameters instead of parameters; plain values only."""
    names = {id(p): name for name, p in named}
    return [
        {
            "params": [names[id(p)] for p in group["params"]],
            **{k: sendable(v) for k, v in group.items() if k not in PARAM_KEYS and _is_plain(v)},
        }
        for group in (optimizer.param_groups if named else ())
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def can_be_sent(value: Any) -> bool:
    return isinstance(value, Tensor) or _is_plain(value)


def sendable(value: Any) -> Any:
    """Subclasses of plain types, such as numpy's floats, become plain."""
    if isinstance(value, (list, tuple)):
        return [sendable(item) for item in value]
    for kind in (int, float, str):
        if isinstance(value, kind) and not isinstance(value, bool):
            return kind(value)
    return value


def take_values(
    optimizer: torch.optim.Optimizer, names: dict[int, str], groups: list[State]
) -> None:
    """Learning rates and the like are those of the rank that trains the parameters of a group."""
    trained = {name: group for group in groups for name in group["params"]}
    for group in optimizer.param_groups:
        source = trained.get(names[id(group["params"][0])], {}) if group["params"] else {}
        for key, value in source.items():
            if key in group and key != "params":
                group[key] = tuple(value) if isinstance(group[key], tuple) else value
