"""The state of training steps as a checkpoint, and back from it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor, nn

from shoal.errors import BadInput, CheckpointError
from shoal.replica.split.shard import ReplicaShard
from shoal.replica.split.state_dicts import state_of
from shoal.runtime.checkpoint_folders import damaged
from shoal.runtime.decoders import convert
from shoal.train.checkpoints import files
from shoal.train.checkpoints.files import Checkpoint, Count
from shoal.train.checkpoints.optimizer_state import (
    OptimizerRest,
    copy_into,
    fit_model,
    fit_optimizer,
    join_optimizers,
    model_tensors,
    on_cpu,
    optimizer_tensors,
    own_state,
)
from shoal.train.step.step import Step

OTHERS = {"ema": "averages", "untrained": "untrained"}  # keys of the document
Others = dict[str, list[tuple[dict[str, Tensor], dict[str, str]]]]  # tensors, tied names; by kind


def snapshot(
    steps: list[Step],
    states: list[dict[str, Tensor]],
    document: dict[str, Any],
    others: Others,
    copy: bool = True,
) -> files.Checkpoint:
    """The models and optimizers of all steps of a job, its other models, and `document`.

    `states` are those of the syncs, which take all ranks to compute. Without `copy` tensors may be
    those that are trained.
    """
    saved = files.Checkpoint({}, {}, {**document, "models": []})
    for i, step in enumerate(steps):
        tensors, tied = gather_model(step, copy) if step.saves_model else ({}, {})
        state, rest = gather_optimizer_state(step, copy)
        saved.model |= {f"{i}:{name}": tensor for name, tensor in tensors.items()}
        saved.optimizer |= {f"{i}:{name}": tensor for name, tensor in state.items()}
        saved.model |= {
            f"{i}:{embedding.spec.name}/{key}": tensor  # ids, rows, and their optimizer state
            for embedding in step.embeddings
            for key, tensor in embedding.state().items()
        }
        by_parameter, rest_of_sync = gather_sync_state(step, states[i])
        saved.optimizer |= {f"sync{i}/{name}": tensor for name, tensor in by_parameter.items()}
        saved.optimizer |= {f"sync{i}:{name}": tensor for name, tensor in rest_of_sync.items()}
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
    for kind, models in others.items():
        saved.document[OTHERS[kind]] = [tied for _, tied in models]
        for i, (tensors, _) in enumerate(models):
            saved.model |= {f"{kind}{i}:{name}": tensor for name, tensor in tensors.items()}
    return saved


def gather_model(step: Step, copy: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """`model_tensors` of the whole model, at the first worker of a replica.

    All workers of the replica call it; the others get their own shard.
    """
    tensors, tied = model_tensors(step.model, copy=copy)
    shards = step.shard.gather((step.shard.gather_full(tensors), tied))
    # of buffers that several stages hold, the last one has what all of the forward wrote
    joined = {name: tensor for tensors, _ in shards for name, tensor in tensors.items()}
    tied = {name: other for _, pairs in shards for name, other in pairs.items()}
    return {name: joined[name] for name in state_of(step.model) if name in joined}, tied


def gather_optimizer_state(
    step: Step, copy: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`optimizer_tensors` of the whole model, in the same way."""
    state, rest = optimizer_tensors(step.update.optimizer, step.flat.named, copy)
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


Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e30)]


class SavedScaler(msgspec.Struct, frozen=True):
    """As GradScaler names it."""

    scale: Positive
    growth_factor: Positive
    backoff_factor: Positive
    growth_interval: Count
    _growth_tracker: Count


class SavedModel(msgspec.Struct, frozen=True):
    """What the manifest says about one step."""

    steps: Count
    optimizer: OptimizerRest
    tied: dict[str, str]
    tables: dict[str, Count] = {}  # name -> updates
    scaler: SavedScaler | None = None


@dataclass(frozen=True)
class FittingState:
    """What a checkpoint has for one step, which fits it."""

    step: Step
    saved: SavedModel
    model: dict[str, Tensor]
    tables: list[dict[str, Tensor]]  # the rows of each embedding
    optimizer: dict[str, Any] | None  # None: this rank trains no parameter
    sync: dict[str, Tensor]
    bare: list[str]  # parameters that start without optimizer state

    def load(self) -> None:
        step = self.step
        saved = self.saved
        for embedding, rows in zip(step.embeddings, self.tables, strict=True):
            embedding.load_state(rows, saved.tables[embedding.spec.name])
        if step.saves_model:
            with step.flat.held_params():
                copy_into(step.model, self.model)
        if self.optimizer is not None:
            load = step.sync.load_optimizer or step.update.optimizer.load_state_dict
            load(self.optimizer)
            own_state(step.update.optimizer)
        step.steps = step.update.steps = saved.steps
        if step.update.schedule is not None:
            step.update.schedule.restart()
        if step.update.scaler is not None and saved.scaler is not None:
            step.update.scaler.load_state_dict(msgspec.structs.asdict(saved.scaler))
        step.sync.after_load()
        step.sync.load_state(self.sync)


def fit(steps: list[Step], saved: Checkpoint, path: Path) -> list[FittingState]:
    """The states of all steps of a job; CheckpointError if one of them does not fit."""
    try:
        models = convert(saved.document.get("models"), list[SavedModel])
    except msgspec.ValidationError as error:
        raise damaged(path, f"its models: {error}") from error
    if len(models) != len(steps):
        raise CheckpointError(
            f"the checkpoint at {path} is of another script: it holds {len(models)} models, and "
            f"this one trains {len(steps)}"
        )
    return [
        _fit_step(step, i, saved, model, path)
        for i, (step, model) in enumerate(zip(steps, models, strict=True))
    ]


def fit_others(
    models: Sequence[tuple[nn.Module, ReplicaShard]], kind: str, saved: Checkpoint, path: Path
) -> list[dict[str, Tensor]]:
    """Of averages ("ema") or models without an optimizer ("untrained"), what was saved of each.

    Nothing where the checkpoint was saved without them.
    """
    try:
        ties = convert(saved.document.get(OTHERS[kind], []), list[dict[str, str]])
    except msgspec.ValidationError as error:
        raise damaged(path, f"its {OTHERS[kind]}: {error}") from error
    if len(ties) not in (0, len(models)):
        raise CheckpointError(
            f"the checkpoint at {path} is of a script with other models: {OTHERS[kind]}"
        )
    return [
        fit_model(model, shard.take_shard(_named(f"{kind}{i}:", saved.model)), tied, path)
        for i, ((model, shard), tied) in enumerate(zip(models, ties, strict=False))
    ]


def _fit_step(
    step: Step, index: int, saved: Checkpoint, of_model: SavedModel, path: Path
) -> FittingState:
    """What the checkpoint has for step number `index` of the job."""
    shard = step.shard.take_shard
    names = set(state_of(step.model)) | {name for name, _ in step.flat.named}
    tensors = _named(f"{index}:", saved.model)
    if set(of_model.tables) != {embedding.spec.name for embedding in step.embeddings}:
        raise CheckpointError(f"the checkpoint at {path} is of a model with other embeddings")
    tables = [_named(f"{embedding.spec.name}/", tensors) for embedding in step.embeddings]
    prefixes = tuple(f"{name}/" for name in of_model.tables)
    tensors = {n: t for n, t in tensors.items() if not n.startswith(prefixes)}
    sync = _named(f"sync{index}:", saved.optimizer)
    sync |= _flat_state(step, shard(_named(f"sync{index}/", saved.optimizer)), names, path)
    try:
        for embedding, rows in zip(step.embeddings, tables, strict=True):
            embedding.check_state(rows, of_model.tables[embedding.spec.name])
        step.sync.check_state(sync)
    except BadInput as error:
        raise CheckpointError(f"the checkpoint at {path} does not fit: {error}") from error
    model: dict[str, Tensor] = {}
    if step.saves_model:  # else another step has it
        model = fit_model(step.model, shard(tensors), of_model.tied, path)
    optimizer = None
    bare = list[str]()
    if step.update.named:
        state = shard(_named(f"{index}:", saved.optimizer))
        optimizer, bare = fit_optimizer(
            step.update.optimizer, step.flat.named, state, of_model.optimizer, names, path
        )
    return FittingState(
        step, of_model, model, tables, optimizer, sync, bare if of_model.steps else []
    )


def _flat_state(
    step: Step, tensors: dict[str, Tensor], names: Collection[str], path: Path
) -> dict[str, Tensor]:
    """This worker's shard of the strategy's state: as large as the flat buffer, by parameter.

    `names` are those of the whole model.
    """
    flat = step.flat
    positions = {name: (i, p) for i, (name, p) in enumerate(flat.named)}
    state: dict[str, Tensor] = {}
    for full, tensor in tensors.items():
        name, _, key = full.rpartition("/")
        if name not in names:
            raise damaged(path, f"state of the strategy for {name!r}, which the model has not")
        if name not in positions:
            continue  # another worker holds it
        i, p = positions[name]
        if tensor.shape != p.shape or not tensor.is_floating_point():
            raise damaged(path, f"state of the strategy for {name} is {tuple(tensor.shape)}")
        key = key.replace(":", "/")
        if key not in state:
            state[key] = torch.zeros(flat.size, dtype=tensor.dtype)
        flat.view(i, state[key], 0).copy_(tensor)
    return state


def _named(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
