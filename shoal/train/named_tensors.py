"""A model and an optimizer as tensors by name, and back.

Names of tensors are those of the model's `state_dict`; the state of an optimizer is stored as
"parameter/key". What is no tensor goes into JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import CheckpointError


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """CPU copies of the model's tensors on this rank, and the names that are tied to another."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor) or value.device.type == "meta":
            continue  # another worker holds it
        key = (value.data_ptr(), value.shape, value.stride())
        if value.numel() and key in seen:
            tied[name] = seen[key]
            continue
        seen[key] = name
        tensors[name] = on_cpu(value)
    return tensors, tied


def load_model(model: nn.Module, tensors: dict[str, Tensor], tied: Any, where: Path) -> None:
    """Copy `tensors` into the model; those of another model are an error before any copy."""
    if not isinstance(tied, dict) or not all(isinstance(name, str) for name in tied.values()):
        raise CheckpointError(f"the checkpoint at {where} is damaged: 'tied' is not a table")
    complete = {**tensors, **{name: tensors[t] for name, t in tied.items() if t in tensors}}
    targets = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    for name, tensor in targets.items():
        if name not in complete:
            raise CheckpointError(
                f"the checkpoint at {where} is of another model: it has no tensor {name!r}"
            )
        if complete[name].shape != tensor.shape:
            raise CheckpointError(
                f"the checkpoint at {where} is of another model: {name} is "
                f"{tuple(complete[name].shape)} there and {tuple(tensor.shape)} here"
            )
    extra = sorted(set(complete) - set(targets))
    if extra:
        raise CheckpointError(
            f"the checkpoint at {where} is of another model: this one has no tensor {extra[0]!r}"
        )
    with torch.no_grad():
        for name, tensor in targets.items():
            if not _is_elsewhere(tensor):
                tensor.copy_(complete[name])


def _is_elsewhere(tensor: Tensor) -> bool:
    """Whether another rank holds it: here it has a shape and no memory."""
    return tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state by parameter name: tensors, and a JSON-able rest."""
    names = {id(p): name for name, p in named}
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for p, state in optimizer.state.items():
        name = names[id(p)]
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = on_cpu(value)
            else:
                values.setdefault(name, {})[key] = value
    groups = [
        {
            "params": [names[id(p)] for p in group["params"]],
            **{k: v for k, v in group.items() if k not in ("params", "param_names") and _plain(v)},
        }
        for group in optimizer.param_groups
    ]
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "values": values}


def join_optimizers(shards: list[dict[str, Any]]) -> dict[str, Any]:
    """The rest of `optimizer_tensors` of all shards, as that of the complete model.

    Groups with the same settings become one.
    """
    groups: dict[str, dict[str, Any]] = {}
    for shard in shards:
        for group in shard["groups"]:
            settings = {key: value for key, value in group.items() if key != "params"}
            joined = groups.setdefault(json.dumps(settings), {"params": [], **settings})
            joined["params"] += [n for n in group["params"] if n not in joined["params"]]
    values = {name: value for shard in shards for name, value in shard["values"].items()}
    return {"class": shards[0]["class"], "groups": list(groups.values()), "values": values}


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, nn.Parameter]],
    tensors: dict[str, Tensor],
    rest: Any,
    where: Path,
) -> None:
    """Load saved state into a new optimizer of the same class over the same parameters."""
    if not isinstance(rest, dict) or rest.get("class") != type(optimizer).__name__:
        saved = rest.get("class") if isinstance(rest, dict) else "nothing"
        raise CheckpointError(
            f"the checkpoint at {where} has the state of {saved}, and the script now trains with "
            f"{type(optimizer).__name__}"
        )
    state = _state_by_name(tensors, rest, where)
    names = {id(p): name for name, p in named}
    document = optimizer.state_dict()
    by_index: dict[int, dict[str, Any]] = {}
    groups = rest.get("groups")
    saved_groups: list[Any] = groups if isinstance(groups, list) else []
    for packed, group in zip(document["param_groups"], optimizer.param_groups, strict=True):
        group_names = [names[id(p)] for p in group["params"]]
        for index, name in zip(packed["params"], group_names, strict=True):
            if name in state:
                by_index[index] = state[name]
        if (saved_group := _group_of(group_names, saved_groups, where)) is not None:
            _restore(packed, saved_group, where)
    document["state"] = by_index
    optimizer.load_state_dict(document)


def _group_of(names: list[str], saved: list[Any], where: Path) -> dict[str, Any] | None:
    """The saved group that holds these parameters; it may also hold those of other ranks."""
    for group in saved:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise CheckpointError(f"the checkpoint at {where} is damaged: its parameter groups")
        if set(names) <= {name for name in group["params"] if isinstance(name, str)}:
            return group
    return None


def _state_by_name(
    tensors: dict[str, Tensor], rest: dict[str, Any], where: Path
) -> dict[str, dict[str, Any]]:
    values = rest.get("values")
    if not isinstance(values, dict) or not all(isinstance(v, dict) for v in values.values()):
        raise CheckpointError(f"the checkpoint at {where} is damaged: optimizer values")
    state: dict[str, dict[str, Any]] = {name: dict(value) for name, value in values.items()}
    for full, tensor in tensors.items():
        name, _, key = full.rpartition("/")
        state.setdefault(name, {})[key] = tensor
    return state


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _restore(group: dict[str, Any], saved: dict[str, Any], where: Path) -> None:
    """Restore numbers (lr, betas, weight_decay, …); flags stay as the script has them."""
    for key, now in group.items():
        if key == "params" or key not in saved or not _is_number(now, tuple):
            continue
        value = tuple(saved[key]) if isinstance(saved[key], list) else saved[key]
        if not _is_number(value, type(now)) or _length(value) != _length(now):
            raise CheckpointError(f"the checkpoint at {where} is damaged: {key}={saved[key]!r}")
        group[key] = value


def _is_number(value: Any, tuples: type) -> bool:
    """Whether it is a number; or a tuple of numbers, if `tuples` is `tuple`."""
    if isinstance(value, tuple) and tuples is tuple:
        return all(_is_number(item, float) for item in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, tuple) else 0


def on_cpu(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU."""
    return tensor.detach().to("cpu", copy=True).contiguous()
