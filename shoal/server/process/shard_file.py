"""What one server saves: the snapshot of its state after a step."""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.errors import ShoalError
from shoal.runtime import clock
from shoal.runtime.background_writer import BackgroundWriter
from shoal.runtime.checkpoint_folders import (
    complete_versions,
    damaged,
    in_words,
    shard_name,
    version_of,
)
from shoal.runtime.decoders import decode_msgpack
from shoal.runtime.files import open_file
from shoal.runtime.wording import say
from shoal.server.messages import ModelSpec
from shoal.server.model.compression import PushCompression
from shoal.server.model.served_model import ServedModel
from shoal.server.model.shard import DTYPES
from shoal.server.model.snapshot import ShardDocument, StateTensors, saved_state
from shoal.server.shared_memory import bytes_of

T = TypeVar("T")
_META = "__meta__"
_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 32
_PREFIX_BYTES = _DIGEST_BYTES + _LENGTH.size


def write_tensors(file: Path, tensors: Mapping[str, Tensor], meta: Any) -> None:
    """`meta` is a msgspec.Struct, or of plain values."""
    packed = msgspec.msgpack.encode(meta)
    data = _digest_of(tensors, packed) + _LENGTH.pack(len(packed)) + packed
    content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    save_file({**tensors, _META: content}, file)


def read_tensors_of(file: Path, kind: type[T]) -> tuple[dict[str, Tensor], T, bytes]:
    """The tensors, the value, and the digest; CheckpointError if anything of it has changed."""
    try:
        os.close(open_file(file))  # a FIFO would be waited for
        tensors = load_file(file)
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise damaged(file, str(error)) from error
    content = tensors.pop(_META, None)
    if content is None or content.dtype != torch.uint8:
        raise damaged(file, "it has no description")
    data = content.numpy().tobytes()
    packed = data[_PREFIX_BYTES:]
    digest = data[:_DIGEST_BYTES]
    if _digest_of(tensors, packed) != digest:
        raise damaged(file, "it has changed")
    try:
        return tensors, decode_msgpack(packed, kind), digest
    except ValueError as error:
        raise damaged(file, str(error)) from error


def _digest_of(tensors: Mapping[str, Tensor], packed: bytes) -> bytes:
    digest = hashlib.sha256(packed)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(bytes_of(tensor.contiguous()))
    return digest.digest()


class SavedShard(NamedTuple):
    """The file of a server, checked in itself."""

    document: ShardDocument
    weights: Tensor
    optimizer: list[Tensor]
    tables: dict[str, list[dict[str, Tensor]]]
    residuals: dict[int, Tensor]  # worker -> bytes
    digest: bytes


def read_shard(file: Path) -> SavedShard:
    """CheckpointError if it is damaged or its tensors are not those that it describes."""
    tensors, document, digest = read_tensors_of(file, ShardDocument)
    names = list(document.tensor_names())
    if set(names) != set(tensors):
        different = min(set(names) ^ set(tensors))
        raise damaged(file, f"it lacks the tensor {different!r}, or nothing is known of it")
    saved = StateTensors.of(document, map(tensors.__getitem__, names))
    _check(file, document, saved.weights, saved.optimizer)
    if saved.residuals:
        _check_residuals(file, document.spec, saved.residuals)
    return SavedShard(document, *saved, digest)


def _check(file: Path, document: ShardDocument, weights: Tensor, optimizer: list[Tensor]) -> None:
    spec = document.spec
    is_shard = weights.shape == (spec.stop - spec.start,) and weights.dtype == DTYPES[spec.dtype]
    if not is_shard or not spec.start <= spec.stop <= spec.size:
        raise damaged(file, "its weights are not those that it describes")
    for held in spec.slices:
        start = held.start - spec.start
        is_inside = 0 <= start <= start + math.prod(held.shape) <= len(weights)
        if not is_inside or held.parameter >= spec.parameters:
            raise damaged(file, "a parameter lies outside its weights")
    state = document.optimizer
    forms = [(tuple(tensor.shape), tensor.dtype) for tensor in optimizer]
    held_slices = [each.slice for each in state.tensors] + [i for i, _, _ in state.numbers]
    is_described = forms == [(each.shape, DTYPES[each.dtype]) for each in state.tensors]
    if not is_described or max(held_slices, default=-1) >= len(spec.slices):
        raise damaged(file, "its optimizer state is not what it describes")


def _check_residuals(file: Path, spec: ModelSpec, residuals: dict[int, Tensor]) -> None:
    if spec.compress is None:
        raise damaged(file, "it has residuals without compression")
    try:
        expected = PushCompression(spec).residual_bytes
    except ShoalError as error:
        raise damaged(file, str(error)) from error
    for residual in residuals.values():
        if residual.dtype != torch.uint8 or residual.shape != (expected,):
            raise damaged(file, "its residuals are not those that it describes")


_CLOSE_S = 60.0


class PartWriter(BackgroundWriter):
    """Failures do not end the run. Of several in a row only the first is reported."""

    def __init__(self, what: str, folder: Path):
        super().__init__()
        self._what = what
        self._folder = folder
        self._has_told = False

    def close(self) -> None:
        """Wait for what is being written."""
        self.join(_CLOSE_S)

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
            self._has_told = False
        except (OSError, SafetensorError, MemoryError, RuntimeError) as error:
            if not self._has_told:
                self._has_told = True
                complete = complete_versions(self._folder)
                step = f"the checkpoint of step {complete[0].number} stays" if complete else ""
                say(
                    f"{self._what} cannot write its checkpoint to {self._folder}: "
                    f"{in_words(error)}; training goes on, and {step or 'there is none before it'}"
                )


class ShardSaver(PartWriter):
    """Saves the models of one server."""

    def __init__(self, folder: Path, server: str):
        super().__init__(server, folder)
        self._lock = clock.Lock()

    def save(
        self, model_id: int, model: ServedModel, number: int, stays: Callable[[], bool]
    ) -> None:
        """Copy the state now and write it later, if it `stays()`; left out while one is written."""
        version = version_of(self._folder, number, model_id)
        name = shard_name(model.spec.index, model.spec.servers)
        with self._lock:
            if self.is_busy:
                return
            document, copies = saved_state(model, number)
            tensors = dict(zip(document.tensor_names(), copies, strict=True))

            def write() -> None:
                if (version.path / name).exists() or not stays():  # another copy's
                    return
                if copies[0].isnan().any():
                    raise RuntimeError("its weights are nan")
                version.write(name, lambda file: write_tensors(file, tensors, document))

            self.start(write)
