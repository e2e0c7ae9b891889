"""Checkpoints: the complete, unsharded model in safetensors files, and a JSON manifest.

    model/manifest.json
    model/model-120-3fa9c1d2e4b5.safetensors
    model/optimizer-120-3fa9c1d2e4b5.safetensors

The manifest has the digests of the files and one of itself, so every byte is under a digest. How
versions replace each other: `runtime/checkpoint_folders.py`. Loading executes nothing; tensors that
were read are mappings of the files, which no saver writes to again.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.runtime.checkpoint_folders import (
    MANIFEST,
    MAX_COUNT,
    MAX_MANIFEST_BYTES,
    TENSOR_FILE,
    damaged,
    new_version,
    read_manifest_bytes,
)
from shoal.runtime.decoders import convert
from shoal.runtime.files import open_file
from shoal.train.checkpoints.tensor_file import DIGEST, NanError, file_digest, write_tensors

Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_COUNT)]
FORMAT = "shoal checkpoint 4"
_DIGEST = "sha256"
_PARTS = ("model", "optimizer")
_MAX_READS = 100  # of a checkpoint that others replace at the same time


@dataclass
class Checkpoint:
    """What is saved. Names of tensors are those of the model's `state_dict`.

    `digest` is that of the manifest, and with it of everything, once it was saved or read.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    document: dict[str, Any] = field(default_factory=dict)  # everything else
    digest: str = ""


def write(path: Path, checkpoint: Checkpoint, refuses_nan: bool = False) -> None:
    """Save under the folder `path`; the checkpoint there stays valid until this one is complete.

    `refuses_nan`: what was saved before is worth more than weights that are nan.
    """
    document = as_json(checkpoint.document)
    steps = document.get("steps", 0)
    try:
        with new_version(path) as version:
            parts = zip(_PARTS, (checkpoint.model, checkpoint.optimizer), strict=True)
            files = {
                part: write_tensors(
                    tensors, version.tensor_file(part, steps), refuses_nan and part == "model"
                )
                for part, tensors in parts
            }
            manifest = {"format": FORMAT, "files": files, **document}
            checkpoint.digest = digest_of(manifest)
            manifest[_DIGEST] = checkpoint.digest
            version.publish(json.dumps(manifest, indent=1).encode())
    except NanError as error:
        raise CheckpointError(
            f'{error} has values that are nan: nothing was saved in {path}; with on_nan="go on" of '
            "job.step or job.setup such a model is trained, and job.save saves it"
        ) from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot save a checkpoint at {path}: {error}") from error


def as_json(document: dict[str, Any]) -> dict[str, Any]:
    """A copy, as a manifest has it."""
    try:
        copied: dict[str, Any] = json.loads(json.dumps(document))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"`about` of a checkpoint has to be JSON: {error}") from error
    return copied


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`, checked for its form and its digest."""
    return _parse_manifest(path, _manifest_bytes(path))


def read(path: Path) -> Checkpoint:
    """The checkpoint at `path`; every file is checked against its digest first.

    A version that a saver replaces meanwhile is given up for the new one.
    """
    for _ in range(_MAX_READS):
        data = _manifest_bytes(path)
        try:
            return _read_version(path, _parse_manifest(path, data))
        except CheckpointError:
            if _manifest_bytes(path) == data:
                raise
    raise CheckpointError(f"the checkpoint at {path} is replaced faster than it can be read")


def digest_of(manifest: dict[str, Any]) -> str:
    """The digest of what a manifest says, however it is laid out as text."""
    content = {key: value for key, value in manifest.items() if key != _DIGEST}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def check_counts(path: Path, document: dict[str, Any]) -> None:
    for key in ("steps", "batches"):
        try:
            convert(document.get(key), Count)
        except msgspec.ValidationError as error:
            raise damaged(path, f"{key!r} is not a count: {error}") from error


def _manifest_bytes(path: Path) -> bytes:
    try:
        data = read_manifest_bytes(path)
    except OSError as error:
        raise CheckpointError(f"the manifest of {path} cannot be read: {error}") from error
    if data is None:
        raise CheckpointError(f"there is no checkpoint at {path} (no {MANIFEST} in it)")
    return data


def _parse_manifest(path: Path, data: bytes) -> dict[str, Any]:
    if len(data) > MAX_MANIFEST_BYTES:
        raise damaged(path, "its manifest is too large")
    try:
        manifest: dict[str, Any] = json.loads(data)
        json.dumps(manifest, ensure_ascii=False).encode()  # ValueError for text that is no UTF-8
        digest = digest_of(manifest) if isinstance(manifest, dict) else ""
    except (ValueError, RecursionError) as error:
        raise damaged(path, "its manifest is not JSON") from error
    if not digest or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path / MANIFEST} is not the manifest of a {FORMAT!r}")
    if manifest.get(_DIGEST) != digest:
        raise damaged(path, f"{MANIFEST} has changed")
    return manifest


def _read_version(path: Path, manifest: dict[str, Any]) -> Checkpoint:
    files = manifest.get("files")
    if not isinstance(files, dict) or set(files) != set(_PARTS):
        raise damaged(path, "its manifest names no files")
    document = {k: v for k, v in manifest.items() if k not in ("format", "files", _DIGEST)}
    check_counts(path, document)
    with ExitStack() as stack:  # all files are opened before the first one is read
        opened = [_open_tensors(path, files[part], stack) for part in _PARTS]
        model, optimizer = (
            _read_tensors(path, files[part], descriptor)
            for part, descriptor in zip(_PARTS, opened, strict=True)
        )
    return Checkpoint(model, optimizer, document, digest_of(manifest))


def _open_tensors(path: Path, entry: Any, stack: ExitStack) -> int:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not TENSOR_FILE.fullmatch(name):
        raise damaged(path, "it names an unexpected file")
    try:
        descriptor = open_file(path / name)
    except OSError as error:
        raise damaged(path, f"{name}: {error}") from error
    stack.callback(os.close, descriptor)
    return descriptor


def _read_tensors(path: Path, entry: dict[str, Any], descriptor: int) -> dict[str, Tensor]:
    name = entry["name"]
    try:
        size = os.fstat(descriptor).st_size
        if size != entry.get("bytes") or file_digest(descriptor) != entry.get(DIGEST):
            raise damaged(path, f"{name} has changed")
        opened = Path(f"/proc/self/fd/{descriptor}")  # works after it was removed, on Linux
        return load_file(opened if opened.exists() or opened.is_symlink() else path / name)
    except (OSError, SafetensorError) as error:
        raise damaged(path, f"{name}: {error}") from error
