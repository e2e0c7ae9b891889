"""The state of training steps as a checkpoint, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.errors import BadInput, CheckpointError
from shoal.train import checkpoint
from shoal.train.named_tensors import (
    join_optimizers,
    load_model,
    load_optimizer,
    model_tensors,
    on_cpu,
    optimizer_tensors,
)
from shoal.train.step import Step


def snapshot(
    steps: list[Step], states: list[dict[str, Tensor]], document: dict[str, Any]
) -> checkpoint.Checkpoint:
    """The models and optimizers of all steps of a job, and `document`.

    `states` are those of the syncs, which take all ranks to compute.
    """
    saved = checkpoint.Checkpoint({}, {}, {**document, "models": []})
    for i, step in enumerate(steps):
        tensors, tied = gather_model(step)
        state, rest = gather_optimizer_state(step)
        saved.model |= {f"{i}:{name}": tensor for name, tensor in tensors.items()}
        saved.optimizer |= {f"{i}:{name}": tensor for name, tensor in state.items()}
        saved.model |= _rows(step, f"{i}:")
        by_parameter, others = gather_sync_state(step, states[i])
        saved.optimizer |= {f"sync{i}/{name}": tensor for name, tensor in by_parameter.items()}
        saved.optimizer |= {f"sync{i}:{name}": tensor for name, tensor in others.items()}
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


def gather_model(step: Step) -> tuple[dict[str, Tensor], dict[str, str]]:
    """`model_tensors` of the whole model, at the first worker of a replica.

    All workers of the replica call it; the others get their own shard.
    """
    tensors, tied = model_tensors(step.model)
    shards = step.shard.gather((step.shard.gather_full(tensors), tied))
    joined = {name: tensor for tensors, _ in reversed(shards) for name, tensor in tensors.items()}
    tied = {name: other for _, pairs in shards for name, other in pairs.items()}
    return {name: joined[name] for name in step.model.state_dict() if name in joined}, tied


def gather_optimizer_state(step: Step) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`optimizer_tensors` of the whole model, in the same way."""
    state, rest = optimizer_tensors(step.update.optimizer, step.flat.named)
    mine = step.shard.gather_full(state), rest
    shards = step.shard.gather(mine)
    if len(shards) == 1:
        return mine
    tensors = {name: tensor for state, _ in reversed(shards) for name, tensor in state.items()}
    return tensors, join_optimizers([rest for _, rest in shards])


def gather_sync_state(
    step: Step, state: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state of a sync by parameter ("parameter/what:it:is"), and its other tensors.

    If the model is split, of the other tensors only single numbers are kept.
    """
    flat = step.flat
    by_parameter = {}
    others = {}
    is_split = step.mesh.pp.size > 1 or step.mesh.tp.size > 1
    for key, tensor in state.items():
        tensor = on_cpu(tensor)
        if tensor.shape == (flat.size,):
            for i, (name, _) in enumerate(flat.named):
                by_parameter[f"{name}/{key.replace('/', ':')}"] = flat.view(i, tensor, 0).clone()
        elif not is_split or tensor.numel() == 1:
            others[key] = tensor
    shards = step.shard.gather((step.shard.gather_full(by_parameter), others))
    joined = {name: tensor for shard, _ in reversed(shards) for name, tensor in shard.items()}
    return joined, others


def _sync_state_of_shard(step: Step, by_parameter: dict[str, Tensor]) -> dict[str, Tensor]:
    """This worker's shard of what `gather_sync_state` joined, in the sync's own layout."""
    flat = step.flat
    mine = step.shard.take_shard(by_parameter)
    state: dict[str, Tensor] = {}
    for i, (name, p) in enumerate(flat.named):
        of_parameter = {n: t for n, t in mine.items() if n.rpartition("/")[0] == name}
        for key, tensor in of_parameter.items():
            key = key.rpartition("/")[2].replace(":", "/")
            if key not in state:
                state[key] = torch.zeros(flat.size, dtype=tensor.dtype)
            if tensor.shape == p.shape:
                flat.view(i, state[key], 0).copy_(tensor)
    return state


def restore(steps: list[Step], saved: checkpoint.Checkpoint, path: Path) -> None:
    """Load a checkpoint into the steps of a job; that of another script is an error."""
    models = saved.document.get("models")
    if not isinstance(models, list) or len(models) != len(steps):
        count = len(models) if isinstance(models, list) else 0
        raise CheckpointError(
            f"the checkpoint at {path} is of another script: it holds {count} models, and this "
            f"one trains {len(steps)}"
        )
    for i, (step, rest) in enumerate(zip(steps, models, strict=True)):
        _restore_step(step, f"{i}:", saved, rest, path)
        step.sync.after_load()
        state = _sync_state_of_shard(step, _named(f"sync{i}/", saved.optimizer))
        step.sync.load_state(state | _named(f"sync{i}:", saved.optimizer))


def _restore_step(
    step: Step, prefix: str, saved: checkpoint.Checkpoint, rest: Any, path: Path
) -> None:
    steps = rest.get("steps") if isinstance(rest, dict) else None
    if not isinstance(steps, int) or steps < 0:
        raise CheckpointError(f"the checkpoint at {path} is damaged: its models")
    model = _restore_rows(step, _named(prefix, saved.model), rest.get("tables", {}), path)
    model = step.shard.take_shard(model)
    optimizer = step.shard.take_shard(_named(prefix, saved.optimizer))
    load_model(step.model, model, rest.get("tied"), path)
    if step.update.named:  # otherwise this rank trains no parameter
        load_optimizer(
            step.update.optimizer, step.flat.named, optimizer, rest.get("optimizer"), path
        )
    step.steps = rest["steps"]
    step.update.steps = rest["steps"]
    if step.update.scaler is not None and isinstance(rest.get("scaler"), dict):
        step.update.scaler.load_state_dict(rest["scaler"])


def _rows(step: Step, prefix: str) -> dict[str, Tensor]:
    """The rows of embeddings, as "table/ids", "table/rows" and their optimizer state."""
    return {
        f"{prefix}{embedding.spec.name}/{key}": tensor
        for embedding in step.embeddings
        for key, tensor in embedding.state().items()
    }


def _restore_rows(
    step: Step, tensors: dict[str, Tensor], tables: Any, path: Path
) -> dict[str, Tensor]:
    """Load saved rows into the embeddings; returns the other tensors."""
    names = {embedding.spec.name for embedding in step.embeddings}
    if not isinstance(tables, dict) or set(tables) != names:
        raise CheckpointError(f"the checkpoint at {path} is of a model with other embeddings")
    for embedding in step.embeddings:
        prefix = embedding.spec.name + "/"
        updates = tables[embedding.spec.name]
        if not isinstance(updates, int):
            raise CheckpointError(f"the checkpoint at {path} is damaged: its tables")
        try:
            embedding.load_state(_named(prefix, tensors), updates)
        except BadInput as error:
            raise CheckpointError(f"the checkpoint at {path} does not fit: {error}") from error
        tensors = {n: t for n, t in tensors.items() if not n.startswith(prefix)}
    return tensors


def _named(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
