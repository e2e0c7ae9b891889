"""Tensors and a value in one safetensors file, with a digest of both. Reading executes nothing.

The value is msgpack in a tensor of bytes, [digest of all tensors | length | msgpack].
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.runtime.decoders import msgpack_decoder
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
    data = _digest(tensors, packed) + _LENGTH.pack(len(packed)) + packed
    content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    save_file({**tensors, _META: content}, file)


def read_tensors_of(file: Path, kind: type[T]) -> tuple[dict[str, Tensor], T, bytes]:
    """The tensors, the value, and the digest; CheckpointError if anything of it has changed."""
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise _damaged(file, str(error)) from error
    packed, digest = _unpack(file, tensors.pop(_META, None))
    if _digest(tensors, packed) != digest:
        raise _damaged(file, "it has changed")
    try:
        return tensors, msgpack_decoder(kind).decode(packed), digest
    except msgspec.DecodeError as error:
        raise _damaged(file, str(error)) from error


def _unpack(file: Path, content: Tensor | None) -> tuple[bytes, bytes]:
    if content is None or content.dtype != torch.uint8 or content.dim() != 1:
        raise _damaged(file, "it has no description")
    size = content.numel()
    if not _PREFIX_BYTES <= size <= _PREFIX_BYTES + MAX_META_BYTES:
        raise _damaged(file, "its description has a wrong length")
    data = content.numpy().tobytes()
    (length,) = _LENGTH.unpack_from(data, _DIGEST_BYTES)
    if length != size - _PREFIX_BYTES:
        raise _damaged(file, "its description has a wrong length")
    return data[_PREFIX_BYTES:], data[:_DIGEST_BYTES]


def _digest(tensors: Mapping[str, Tensor], packed: bytes) -> bytes:
    digest = hashlib.sha256(packed)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(bytes_of(tensor.contiguous()))
    return digest.digest()


def _damaged(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint at {file} is damaged: {reason}")
