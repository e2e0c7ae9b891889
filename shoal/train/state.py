"""The state of training steps as a checkpoint; back from it: `restore.py`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.replica.state_dicts import state_of
from shoal.train import checkpoint
from shoal.train.named_tensors import model_tensors, on_cpu
from shoal.train.optimizer_state import join_optimizers, optimizer_tensors
from shoal.train.step import Step


def snapshot(
    steps: list[Step], states: list[dict[str, Tensor]], document: dict[str, Any]
) -> checkpoint.Checkpoint:
    """The models and optimizers of all steps of a job, and `document`.

    `states` are those of the syncs, which take all ranks to compute.
    """
    saved = checkpoint.Checkpoint({}, {}, {**document, "models": []})
    for i, step in enumerate(steps):
        tensors, tied = gather_model(step) if step.saves_model else ({}, {})
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
                "tables": {e.spec.name: e.stored_updates for e in step.embeddings},
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
    # of buffers that several stages hold, the last one has what all of the forward wrote
    joined = {name: tensor for tensors, _ in shards for name, tensor in tensors.items()}
    tied = {name: other for _, pairs in shards for name, other in pairs.items()}
    return {name: joined[name] for name in state_of(step.model) if name in joined}, tied


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
    is_split = step.mesh.replica_group.size > 1
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


def _rows(step: Step, prefix: str) -> dict[str, Tensor]:
    """The rows of embeddings, as "table/ids", "table/rows" and their optimizer state."""
    return {
        f"{prefix}{embedding.spec.name}/{key}": tensor
        for embedding in step.embeddings
        for key, tensor in embedding.state().items()
    }
