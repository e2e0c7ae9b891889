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

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

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
