"""What one server saves: the snapshot of its state after a step, and which pushes it includes."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.embedding.spec import TableSpec
from shoal.errors import ShoalError
from shoal.runtime.checkpoint_folders import damaged
from shoal.runtime.decoders import msgpack_decoder
from shoal.server.consistency import Count, LedgerState
from shoal.server.messages import ModelSpec, Name, ShardState
from shoal.server.model.compression import PushCompression
from shoal.server.model.shard import DTYPES
from shoal.server.model.snapshot import SavedWorker, Snapshot
from shoal.server.shared_memory import bytes_of

T = TypeVar("T")
_META = "__meta__"
_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 32
_PREFIX_BYTES = _DIGEST_BYTES + _LENGTH.size
MAX_META_BYTES = 1 << 30


def write_tensors(file: Path, tensors: Mapping[str, Tensor], meta: Any) -> None:
    """`meta` is a msgspec.Struct, or of plain values."""
    packed = msgspec.msgpack.encode(meta)
    data = _digest_of(tensors, packed) + _LENGTH.pack(len(packed)) + packed
    content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    save_file({**tensors, _META: content}, file)


def read_tensors_of(file: Path, kind: type[T]) -> tuple[dict[str, Tensor], T, bytes]:
    """The tensors, the value, and the digest; CheckpointError if anything of it has changed."""
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise damaged(file, str(error)) from error
    packed, digest = _unpack(file, tensors.pop(_META, None))
    if _digest_of(tensors, packed) != digest:
        raise damaged(file, "it has changed")
    try:
        return tensors, msgpack_decoder(kind).decode(packed), digest
    except msgspec.DecodeError as error:
        raise damaged(file, str(error)) from error


def _unpack(file: Path, content: Tensor | None) -> tuple[bytes, bytes]:
    if content is None or content.dtype != torch.uint8 or content.dim() != 1:
        raise damaged(file, "it has no description")
    size = content.numel()
    if not _PREFIX_BYTES <= size <= _PREFIX_BYTES + MAX_META_BYTES:
        raise damaged(file, "its description has a wrong length")
    data = content.numpy().tobytes()
    (length,) = _LENGTH.unpack_from(data, _DIGEST_BYTES)
    if length != size - _PREFIX_BYTES:
        raise damaged(file, "its description has a wrong length")
    return data[_PREFIX_BYTES:], data[:_DIGEST_BYTES]


def _digest_of(tensors: Mapping[str, Tensor], packed: bytes) -> bytes:
    digest = hashlib.sha256(packed)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(bytes_of(tensor.contiguous()))
    return digest.digest()


Format = Literal["shoal server checkpoint 1"]
_FORMAT: Format = "shoal server checkpoint 1"
_WEIGHTS = "weights"


class CountedPush(msgspec.Struct, frozen=True):
    """All pushes of a process of a worker up to `sequence` are in the weights."""

    worker: Count
    incarnation: Count
    sequence: Count


class SavedTable(msgspec.Struct, frozen=True):
    """Names of the tensors of each chunk of rows."""

    spec: TableSpec
    steps: Count
    chunks: tuple[tuple[Name, ...], ...]


class ShardDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is no tensor in the file of a server."""

    format: Format
    number: Count
    spec: ModelSpec
    position: Count
    epoch: Count
    ledger: LedgerState
    pushes: tuple[CountedPush, ...]
    optimizer: ShardState
    tables: tuple[SavedTable, ...]
    residuals: tuple[Count, ...] = ()  # workers whose residuals are here


class SavedShard(NamedTuple):
    """The file of a server, checked in itself."""

    document: ShardDocument
    weights: Tensor
    optimizer: list[Tensor]
    tables: dict[str, list[dict[str, Tensor]]]
    residuals: dict[int, Tensor]  # worker -> bytes
    digest: bytes


def write_shard(
    file: Path,
    number: int,
    spec: ModelSpec,
    snapshot: Snapshot,
    workers: Mapping[int, SavedWorker],
) -> None:
    tables = [
        SavedTable(table.spec, table.steps, tuple(tuple(chunk) for chunk in table.chunks))
        for table in snapshot.tables
    ]
    pushes = [
        CountedPush(worker, workers[worker].incarnation if worker in workers else 0, sequence)
        for worker, sequence in sorted(snapshot.decided.items())
    ]
    residuals = {w: saved.residual for w, saved in workers.items() if saved.residual is not None}
    document = ShardDocument(
        _FORMAT,
        number,
        spec,
        snapshot.position,
        snapshot.epoch,
        snapshot.ledger,
        tuple(pushes),
        snapshot.optimizer,
        tuple(tables),
        tuple(sorted(residuals)),
    )
    write_tensors(file, _tensors(snapshot) | _residual_tensors(residuals), document)


def _tensors(snapshot: Snapshot) -> dict[str, Tensor]:
    tensors = {_WEIGHTS: snapshot.weights}
    tensors |= {f"optimizer/{i}": tensor for i, tensor in enumerate(snapshot.optimizer_tensors)}
    for i, table in enumerate(snapshot.tables):
        for j, chunk in enumerate(table.chunks):
            tensors |= {f"table/{i}/{j}/{key}": tensor for key, tensor in chunk.items()}
    return tensors


def _residual_tensors(residuals: Mapping[int, bytes | bytearray]) -> dict[str, Tensor]:
    return {
        f"residual/{worker}": torch.frombuffer(bytearray(residual), dtype=torch.uint8)
        for worker, residual in residuals.items()
    }


def read_shard(file: Path) -> SavedShard:
    """CheckpointError if it is damaged or its tensors are not those that it describes."""
    tensors, document, digest = read_tensors_of(file, ShardDocument)
    try:
        weights = tensors.pop(_WEIGHTS)
        optimizer = [tensors.pop(f"optimizer/{i}") for i in range(len(document.optimizer.tensors))]
        tables = {
            table.spec.name: [
                {key: tensors.pop(f"table/{i}/{j}/{key}") for key in chunk}
                for j, chunk in enumerate(table.chunks)
            ]
            for i, table in enumerate(document.tables)
        }
        residuals = {worker: tensors.pop(f"residual/{worker}") for worker in document.residuals}
    except KeyError as error:
        raise damaged(file, f"it has no tensor {error}") from error
    if tensors:
        raise damaged(file, f"nothing is known of its tensor {next(iter(tensors))!r}")
    _check(file, document, weights, optimizer)
    _check_residuals(file, document.spec, residuals)
    return SavedShard(document, weights, optimizer, tables, residuals, digest)


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
    for described, tensor in zip(document.optimizer.tensors, optimizer, strict=True):
        form = (tuple(tensor.shape), tensor.dtype)
        is_held = described.slice < len(spec.slices)
        if not is_held or form != (described.shape, DTYPES[described.dtype]):
            raise damaged(file, "its optimizer state is not what it describes")
    if any(i >= len(spec.slices) for i, _, _ in document.optimizer.numbers):
        raise damaged(file, "its optimizer state is not what it describes")


def _check_residuals(file: Path, spec: ModelSpec, residuals: dict[int, Tensor]) -> None:
    if not residuals:
        return
    if spec.compress is None:
        raise damaged(file, "it has residuals without compression")
    try:
        expected = PushCompression(spec).residual_bytes
    except ShoalError as error:
        raise damaged(file, str(error)) from error
    for residual in residuals.values():
        if residual.dtype != torch.uint8 or residual.shape != (expected,):
            raise damaged(file, "its residuals are not those that it describes")
