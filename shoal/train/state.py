"""The state of training steps as a checkpoint, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.errors import BadInput, CheckpointError
from shoal.train import checkpoint
from shoal.train.step import Step


def snapshot(
    steps: list[Step], states: list[dict[str, Tensor]], document: dict[str, Any]
) -> checkpoint.Checkpoint:
    """The models and optimizers of all steps of a job, and what else `document` says of it.

    `states` are those of the syncs, which all ranks have to be asked for.
    """
    saved = checkpoint.Checkpoint({}, {}, {**document, "models": []})
    for i, step in enumerate(steps):
        tensors, tied = whole_model(step)
        state, rest = whole_optimizer(step)
        saved.model |= {f"{i}:{name}": tensor for name, tensor in tensors.items()}
        saved.optimizer |= {f"{i}:{name}": tensor for name, tensor in state.items()}
        saved.model |= _rows(step, f"{i}:")
        by_name, rest_of_sync = whole_sync(step, states[i])
        saved.optimizer |= {f"sync{i}/{name}": tensor for name, tensor in by_name.items()}
        saved.optimizer |= {f"sync{i}:{name}": tensor for name, tensor in rest_of_sync.items()}
        scaler = step.update.scaler
        saved.document["models"].append(
            {
                "tables": {e.spec.name: e.updates for e in step.embeddings},
                "tied": tied,
                "optimizer": rest,
                "steps": step.steps,
                "scaler": None if scaler is None else scaler.state_dict(),
            }
        )
    return saved


def whole_model(step: Step) -> tuple[dict[str, Tensor], dict[str, str]]:
    """`checkpoint.model_tensors` of the whole model, at the first worker of a replica.

    All workers of the replica call it; what the others get is their own part.
    """
    tensors, tied = checkpoint.model_tensors(step.model)
    parts = step.shard.gather((step.shard.gather_full(tensors), tied))
    found = {name: tensor for tensors, _ in reversed(parts) for name, tensor in tensors.items()}
    tied = {name: other for _, pairs in parts for name, other in pairs.items()}
    return {name: found[name] for name in step.model.state_dict() if name in found}, tied


def whole_optimizer(step: Step) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`checkpoint.optimizer_tensors` of the whole model, in the same way."""
    state, rest = checkpoint.optimizer_tensors(step.update.optimizer, step.flat.named)
    mine = step.shard.gather_full(state), rest
    parts = step.shard.gather(mine)
    if len(parts) == 1:
        return mine
    tensors = {name: tensor for state, _ in reversed(parts) for name, tensor in state.items()}
    return tensors, checkpoint.join_optimizers([rest for _, rest in parts])


def whole_sync(step: Step, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a sync keeps, in the same way: "parameter/what:it:is", and what is of no parameter.

    Of a model that is split, the latter is kept where it is a number.
    """
    flat = step.flat
    by_name = {}
    rest = {}
    is_split = step.mesh.pp.size > 1 or step.mesh.tp.size > 1
    for key, tensor in state.items():
        tensor = checkpoint.on_cpu(tensor)
        if tensor.shape == (flat.size,):
            for i, (name, _) in enumerate(flat.named):
                by_name[f"{name}/{key.replace('/', ':')}"] = flat.view(i, tensor, 0).clone()
        elif not is_split or tensor.numel() == 1:
            rest[key] = tensor
    parts = step.shard.gather((step.shard.gather_full(by_name), rest))
    found = {name: tensor for part, _ in reversed(parts) for name, tensor in part.items()}
    return found, rest


def _sync_of_part(step: Step, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """This worker's part of `whole_sync`, as the sync has given it."""
    flat = step.flat
    taken = step.shard.take_shard(whole)
    found: dict[str, Tensor] = {}
    for i, (name, p) in enumerate(flat.named):
        mine = {n: t for n, t in taken.items() if n.rpartition("/")[0] == name}
        for key, tensor in mine.items():
            key = key.rpartition("/")[2].replace(":", "/")
            if key not in found:
                found[key] = torch.zeros(flat.size, dtype=tensor.dtype)
            if tensor.shape == p.shape:
                flat.view(i, found[key], 0).copy_(tensor)
    return found


def restore(steps: list[Step], saved: checkpoint.Checkpoint, path: Path) -> None:
    """Put a checkpoint into the steps of a job; another script's is refused."""
    models = saved.document.get("models")
    if not isinstance(models, list) or len(models) != len(steps):
        found = len(models) if isinstance(models, list) else 0
        raise CheckpointError(
            f"the checkpoint at {path} is of another script: it holds {found} models, and this "
            f"one trains {len(steps)}"
        )
    for i, (step, rest) in enumerate(zip(steps, models, strict=True)):
        _restore_step(step, f"{i}:", saved, rest, path)
        step.sync.after_load()
        of_part = _sync_of_part(step, _named(f"sync{i}/", saved.optimizer))
        step.sync.load_state(of_part | _named(f"sync{i}:", saved.optimizer))


def _restore_step(
    step: Step, prefix: str, saved: checkpoint.Checkpoint, rest: Any, path: Path
) -> None:
    steps = rest.get("steps") if isinstance(rest, dict) else None
    if not isinstance(steps, int) or steps < 0:
        raise CheckpointError(f"the checkpoint at {path} is damaged: its models")
    model, optimizer = (_named(prefix, part) for part in (saved.model, saved.optimizer))
    model = _restore_rows(step, model, rest.get("tables", {}), path)
    model = step.shard.take_shard(model)
    optimizer = step.shard.take_shard(optimizer)
    checkpoint.load_model(step.model, model, rest.get("tied"), path)
    if step.update.named:  # else this rank trains no parameter
        checkpoint.load_optimizer(
            step.update.optimizer, step.flat.named, optimizer, rest.get("optimizer"), path
        )
    step.steps = step.update.steps = rest["steps"]
    if step.update.scaler is not None and isinstance(rest.get("scaler"), dict):
        step.update.scaler.load_state_dict(rest["scaler"])


def _rows(step: Step, prefix: str) -> dict[str, Tensor]:
    """The rows of embeddings, as "table/ids", "table/rows" and what their optimizer keeps."""
    return {
        f"{prefix}{embedding.spec.name}/{key}": tensor
        for embedding in step.embeddings
        for key, tensor in embedding.state().items()
    }


def _restore_rows(
    step: Step, tensors: dict[str, Tensor], tables: Any, path: Path
) -> dict[str, Tensor]:
    """Put saved rows into the embeddings; returns the other tensors."""
    names = {embedding.spec.name for embedding in step.embeddings}
    if not isinstance(tables, dict) or set(tables) != names:
        raise CheckpointError(f"the checkpoint at {path} is of a model with other embeddings")
    for embedding in step.embeddings:
        prefix = embedding.spec.name + "/"
        updates = tables[embedding.spec.name]
        own = _named(prefix, tensors)
        if not isinstance(updates, int):
            raise CheckpointError(f"the checkpoint at {path} is damaged: its tables")
        try:
            embedding.load_state(own, updates)
        except BadInput as error:
            raise CheckpointError(f"the checkpoint at {path} does not fit: {error}") from error
        tensors = {n: t for n, t in tensors.items() if not n.startswith(prefix)}
    return tensors


def _named(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
