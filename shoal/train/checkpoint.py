"""Checkpoints: the complete, unsharded model in safetensors files, and a JSON manifest.

    model/manifest.json
    model/model-120-3fa9c1.safetensors
    model/optimizer-120-3fa9c1.safetensors

New files are written beside the old ones, then the manifest is replaced atomically, then the old
files are removed. A crash at any moment leaves one complete checkpoint. Loading executes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "shoal checkpoint 1"
_MAX_MANIFEST_BYTES = 64 << 20
_TENSOR_FILE = re.compile(r"(model|optimizer)-[0-9]{1,12}-[0-9a-f]{6}\.safetensors")
_PARTIAL_MANIFEST = re.compile(re.escape(MANIFEST) + r"\.[0-9a-f]{6}")


@dataclass
class Checkpoint:
    """What is saved. Names of tensors are those of the model's `state_dict`."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    document: dict[str, Any] = field(default_factory=dict)  # everything else


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Save under the folder `path`; the checkpoint there stays valid until this one is complete."""
    try:
        json.dumps(checkpoint.document)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"`about` of a checkpoint has to be JSON: {error}") from error
    try:
        path.mkdir(parents=True, exist_ok=True)
        suffix = f"{checkpoint.document.get('steps', 0)}-{secrets.token_hex(3)}"
        files = {
            "model": _write_tensors(path / f"model-{suffix}.safetensors", checkpoint.model),
            "optimizer": _write_tensors(
                path / f"optimizer-{suffix}.safetensors", checkpoint.optimizer
            ),
        }
        manifest = {"format": FORMAT, "files": files, **checkpoint.document}
        _replace(path / MANIFEST, json.dumps(manifest, indent=1).encode())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot save a checkpoint at {path}: {error}") from error
    _remove_old(path, {entry["name"] for entry in files.values()})


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`, checked for its form."""
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"there is no checkpoint at {path} (no {MANIFEST} in it)")
    if file.stat().st_size > _MAX_MANIFEST_BYTES:
        raise CheckpointError(f"the checkpoint at {path} is damaged: its manifest is too large")
    try:
        manifest = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the checkpoint at {path} is damaged: its manifest is not JSON"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not the manifest of a {FORMAT!r}")
    return manifest


def read(path: Path) -> Checkpoint:
    """The checkpoint at `path`; every file is checked against its digest first."""
    manifest = read_manifest(path)
    files = manifest.get("files")
    if not isinstance(files, dict) or set(files) != {"model", "optimizer"}:
        raise CheckpointError(f"the checkpoint at {path} is damaged: its manifest names no files")
    model = _read_tensors(path, files["model"])
    optimizer = _read_tensors(path, files["optimizer"])
    document = {k: v for k, v in manifest.items() if k not in ("format", "files")}
    for key in ("steps", "batches"):
        if not isinstance(document.get(key), int) or document[key] < 0:
            raise CheckpointError(f"the checkpoint at {path} is damaged: {key!r} is not a count")
    return Checkpoint(model, optimizer, document)


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


def _write_tensors(file: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    save_file(tensors, file)
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())
    return {"name": file.name, "bytes": file.stat().st_size, "sha256": _digest(file)}


def _read_tensors(path: Path, entry: Any) -> dict[str, Tensor]:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not _TENSOR_FILE.fullmatch(name):
        raise CheckpointError(f"the checkpoint at {path} is damaged: it names an unexpected file")
    file = path / name
    try:
        if file.stat().st_size != entry.get("bytes") or _digest(file) != entry.get("sha256"):
            raise CheckpointError(f"the checkpoint at {path} is damaged: {name} has changed")
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint at {path} is damaged: {name}: {error}") from error


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _replace(file: Path, data: bytes) -> None:
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(3)}")
    with open(temporary, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, file)


def _remove_old(path: Path, keep: set[str]) -> None:
    """Remove files of earlier checkpoints, incomplete ones included; other files stay."""
    for file in path.iterdir():
        is_old = _TENSOR_FILE.fullmatch(file.name) or _PARTIAL_MANIFEST.fullmatch(file.name)
        if is_old and file.name not in keep:
            file.unlink(missing_ok=True)
