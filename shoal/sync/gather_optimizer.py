"""The state of sharded optimizers, brought together on rank 0 for a checkpoint.

A rank says what it has as JSON (names, types and shapes of tensors, plain values, parameter
groups) and then sends the tensors in that order.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from shoal.comm.group import Group
from shoal.errors import ShoalError
from shoal.replica.flat_params import FlatParams
from shoal.sync.optimizer_step import Update, make_optimizer

_LARGEST_BYTES = 256 << 20
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def gather_optimizer(
    update: Update, flat: FlatParams, group: Group
) -> torch.optim.Optimizer | None:
    """On rank 0 an optimizer of all parameters with everybody's state; None elsewhere.

    All ranks call it. It takes memory for the state of the whole model on rank 0.
    """
    if group.rank != 0:
        _send(update, flat, group)
        return None
    whole = make_optimizer(update.factory, flat.named)
    by_name = dict(flat.named)
    groups = _own_document(update)["groups"]
    for p in update.params:
        if p in update.optimizer.state:
            whole.state[p] = update.optimizer.state[p]
    for peer in range(1, group.size):
        document = _receive_document(group, flat.device, peer)
        groups += document["groups"]
        for name, entries in document["state"].items():
            if name not in by_name:
                raise ShoalError(f"rank {peer} has optimizer state of {name}, which is not here")
            whole.state[by_name[name]] = {
                key: _receive(group, flat.device, peer, entry) for key, entry in entries.items()
            }
    _take_values(whole, {id(p): name for name, p in flat.named}, groups)
    return whole


def _own_document(update: Update) -> dict[str, Any]:
    """What this rank has, without the tensors; values that are not plain stay here."""
    names = {id(p): name for name, p in update.named}
    state = {
        names[id(p)]: {k: _describe(v) for k, v in entries.items() if _can_travel(v)}
        for p, entries in update.optimizer.state.items()
        if id(p) in names
    }
    groups = [
        {
            "params": [names[id(p)] for p in group["params"]],
            **{
                k: v
                for k, v in group.items()
                if k not in ("params", "param_names") and _is_plain(v)
            },
        }
        for group in update.optimizer.param_groups
        if update.named
    ]
    return {"state": state, "groups": groups}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _can_travel(value: Any) -> bool:
    return isinstance(value, Tensor) or _is_plain(value)


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    return {"value": value}


def _send(update: Update, flat: FlatParams, group: Group) -> None:
    document = _own_document(update)
    text = json.dumps(document).encode()
    message = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(flat.device)
    group.send(torch.tensor([len(text)], device=flat.device), 0).wait()
    group.send(message, 0).wait()
    states = {name: update.optimizer.state[p] for name, p in update.named}
    for name, entries in document["state"].items():
        for key, entry in entries.items():
            if "dtype" in entry and math.prod(entry["shape"]):
                tensor = states[name][key].detach().to(flat.device).contiguous()
                group.send(tensor.view(-1), 0).wait()


def _receive_document(group: Group, device: torch.device, peer: int) -> dict[str, Any]:
    length = torch.zeros(1, dtype=torch.int64, device=device)
    group.recv(length, peer).wait()
    if not 0 < int(length) <= _LARGEST_BYTES:
        raise ShoalError(f"rank 0 got a strange length of optimizer state from rank {peer}")
    message = torch.zeros(int(length), dtype=torch.uint8, device=device)
    group.recv(message, peer).wait()
    document = json.loads(bytes(message.cpu().numpy().tobytes()))
    assert isinstance(document, dict)
    return document


def _receive(group: Group, device: torch.device, peer: int, entry: dict[str, Any]) -> Any:
    if "dtype" not in entry:
        return entry["value"]
    shape = [int(n) for n in entry["shape"]]
    into = torch.zeros(math.prod(shape), dtype=_DTYPES[entry["dtype"]], device=device)
    if into.numel():
        group.recv(into, peer).wait()
    return into.cpu().view(shape)


def _take_values(
    whole: torch.optim.Optimizer, names: dict[int, str], groups: list[dict[str, Any]]
) -> None:
    """Learning rates and the like are those of whoever trains the parameters of a group."""
    trained = {name: group for group in groups for name in group["params"]}
    for group in whole.param_groups:
        source = trained.get(names[id(group["params"][0])], {}) if group["params"] else {}
        for key, value in source.items():
            if key in group and key != "params":
                group[key] = tuple(value) if isinstance(group[key], tuple) else value
