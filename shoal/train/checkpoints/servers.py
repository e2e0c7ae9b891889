"""Checkpoints that servers have written by themselves, as those of `job.save`.

servers   weights, optimizer state, residuals, rows  ─┐
worker    names, buffers, position in the data       ─┴─▶ Checkpoint, which any strategy loads
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.replica.split.state_dicts import state_of
from shoal.runtime.checkpoint_folders import WORKER_FILE, ServerVersion, complete_versions, damaged
from shoal.server.messages import Name, ParameterSlice, Shape
from shoal.server.model.compression import PushCompression
from shoal.server.model.shard import DTYPES
from shoal.server.process.shard_file import SavedShard, read_shard, read_tensors_of
from shoal.sync.ps.push import PREFIX
from shoal.sync.ps.worker import put_rows, rows_of
from shoal.train.checkpoints.files import Checkpoint, check_counts
from shoal.train.checkpoints.optimizer_state import model_tensors, optimizer_tensors
from shoal.train.step.step import Step


class WorkerDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is no tensor in the part of the workers; `document` is that of a `Checkpoint`."""

    parameters: tuple[tuple[Name, Shape], ...]  # of the model, in the order of the flat buffer
    names: tuple[Name, ...]  # of the model's tensors, in the order of its state_dict
    document: dict[str, Any]


def worker_part(step: Step, document: dict[str, Any]) -> tuple[dict[str, Tensor], WorkerDocument]:
    """Copies of what the servers do not hold: buffers and frozen parameters."""
    parameters = tuple((name, tuple(p.shape)) for name, p in step.flat.named)
    tensors, tied = model_tensors(step.model, {name for name, _ in parameters})
    state = state_of(step.model)
    names = tuple(n for n, value in state.items() if isinstance(value, Tensor) and n not in tied)
    _, rest = optimizer_tensors(step.update.optimizer, step.flat.named)
    model = {
        "tables": {e.spec.name: e.updates for e in step.embeddings},
        "tied": tied,
        "optimizer": rest,
        "steps": step.steps,
        "scaler": None,
    }
    return tensors, WorkerDocument(parameters, names, {**document, "models": [model]})


def read_servers(folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The latest one that is complete and not damaged; None if there is none yet."""
    first: CheckpointError | None = None
    for version in complete_versions(folder):
        try:
            saved = _assemble(version)
        except CheckpointError as error:
            first = first or error
            continue
        if first is not None:
            say(f"{first}; the one before it is used")
        return saved
    if first is not None:
        raise first
    return None


_UNFIT = (LookupError, RuntimeError, TypeError, ValueError, AttributeError, ArithmeticError)


def _assemble(version: ServerVersion) -> Checkpoint:
    shards = [read_shard(file) for file in version.shard_files() or ()]
    buffers, described, digest = read_tensors_of(version.path / WORKER_FILE, WorkerDocument)
    joined = _Joined(version.path, shards, described.parameters)
    try:
        joined.check()
        check_counts(version.path, described.document)
        weights = joined.weights()
        model = {f"0:{n}": weights[n] if n in weights else buffers[n] for n in described.names}
        state, rest = joined.optimizer()
        document = described.document
        (of_model,) = document["models"]
        of_model["optimizer"] |= rest
        rows, of_model["tables"] = joined.rows(of_model["tables"])
        optimizer = {f"0:{name}": t for name, t in state.items()} | joined.residuals()
    except _UNFIT as error:
        raise damaged(version.path, f"its parts do not fit each other: {error}") from error
    parts = b"".join([digest, *(shard.digest for shard in shards)])
    return Checkpoint(model | rows, optimizer, document, hashlib.sha256(parts).hexdigest())


@dataclass(frozen=True)
class _Joined:
    """The files of one checkpoint."""

    where: Path
    shards: list[SavedShard]
    parameters: tuple[tuple[Name, Shape], ...]

    def check(self) -> None:
        """All files are of one model and step, and have all of its parameters."""
        documents = [shard.document for shard in self.shards]
        shapes = [shape for _, shape in self.parameters]
        if len({(d.number, d.spec.size, d.ledger.version) for d in documents}) != 1:
            raise damaged(self.where, "its servers were saved after different steps")
        if [d.spec.index for d in documents] != list(range(len(documents))):
            raise damaged(self.where, "its servers are not in order")
        if any(d.spec.parameters != len(shapes) for d in documents):
            raise damaged(self.where, "its servers and its worker have different models")
        filled = [0] * len(shapes)
        for shard in self.shards:
            for held in shard.document.spec.slices:
                shape = shapes[held.parameter]
                rows = held.first_row + (held.shape[0] if held.shape else 0)
                is_part = shape and held.shape[1:] == shape[1:] and rows <= shape[0]
                if held.shape != shape and not is_part:
                    raise damaged(self.where, "a slice does not fit its parameter")
                filled[held.parameter] += math.prod(held.shape)
        if filled != [math.prod(shape) for shape in shapes]:
            raise damaged(self.where, "its servers do not have all parameters")

    def weights(self) -> dict[str, Tensor]:
        dtype = DTYPES[self.shards[0].document.spec.dtype]
        found = [torch.empty(shape, dtype=dtype) for _, shape in self.parameters]
        for shard in self.shards:
            for held, values in _slices(shard, shard.weights):
                rows_of(found[held.parameter], held).copy_(values)
        return {name: t for (name, _), t in zip(self.parameters, found, strict=True)}

    def optimizer(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors of `optimizer_tensors`, and the part of its rest that servers know."""
        tensors: dict[str, Tensor] = {}
        values: dict[str, dict[str, Any]] = {}
        for shard in self.shards:
            slices = shard.document.spec.slices
            state = shard.document.optimizer
            for described, tensor in zip(state.tensors, shard.optimizer, strict=True):
                self._put(tensors, described.key, tensor, slices[described.slice])
            for index, key, number in state.numbers:
                name, _ = self.parameters[slices[index].parameter]
                values.setdefault(name, {})[key] = number
        keys: dict[str, set[str]] = {name: set(entries) for name, entries in values.items()}
        for full in tensors:
            name, _, key = full.rpartition("/")
            keys.setdefault(name, set()).add(key)
        found = {name: sorted(of_name) for name, of_name in keys.items()}
        return tensors, {"values": values, "keys": found}

    def _put(
        self, tensors: dict[str, Tensor], key: str, tensor: Tensor, held: ParameterSlice
    ) -> None:
        name, shape = self.parameters[held.parameter]
        put_rows(tensors, f"{name}/{key}", tensor, held, shape)

    def residuals(self) -> dict[str, Tensor]:
        """What compression has not sent yet, of workers that were live, as `snapshot` names it."""
        residuals: dict[str, Tensor] = {}
        bases: dict[str, Tensor] = {}
        for worker in set.intersection(*(set(shard.residuals) for shard in self.shards)):
            key = f"{PREFIX}worker/{worker}"
            for index, shard in enumerate(self.shards):
                compression = PushCompression(shard.document.spec)
                residual, basis = compression.read_residual(shard.residuals[worker])
                if basis.numel():
                    bases[f"sync0:{key}/basis/{index}"] = basis
                for held, values in _slices(shard, residual):
                    self._put(residuals, f"{key}/residual".replace("/", ":"), values, held)
        return bases | {f"sync0/{name}": tensor for name, tensor in residuals.items()}

    def rows(self, updates: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The rows of all tables, as `Embedding.state` names them, and the updates of each."""
        chunks: dict[str, list[Tensor]] = {}
        steps = dict(updates)
        for shard in self.shards:
            for table in shard.document.tables:
                name = table.spec.name
                steps[name] = max(steps.get(name, 0), table.steps)
                for chunk in shard.tables[name]:
                    for key, tensor in chunk.items():
                        chunks.setdefault(f"0:{name}/{key}", []).append(tensor)
        return {name: torch.cat(tensors) for name, tensors in chunks.items()}, steps


def _slices(shard: SavedShard, flat: Tensor) -> Iterator[tuple[ParameterSlice, Tensor]]:
    """What a server holds of each parameter, of a tensor as large as its weights."""
    spec = shard.document.spec
    for held in spec.slices:
        start = held.start - spec.start
        yield held, flat[start : start + math.prod(held.shape)].view(held.shape)
