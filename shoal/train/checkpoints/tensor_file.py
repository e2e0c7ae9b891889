"""Writes safetensors files: digested on the way, and to the disk while the rest is being copied."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from xxhash import xxh3_128

from shoal.errors import CheckpointError
from shoal.train.checkpoints.digests import CHUNK_BYTES, DIGEST


def write_tensors(tensors: Mapping[str, Tensor], file: Path) -> dict[str, Any]:
    """A new file with tensors of the CPU; what a manifest says about it. It is not durable yet."""
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # all are aligned
    contents = (_bytes_of(tensors[name]) for name in order)
    done, digests, digest = 0, list[bytes](), xxh3_128()
    with open(file, "xb", buffering=64 << 10) as handle:  # small tensors are written together
        for left in chain([memoryview(_header(tensors, order))], contents):
            while left:
                piece = left[: CHUNK_BYTES - done % CHUNK_BYTES]
                digest.update(piece)
                handle.write(piece)
                done, left = done + len(piece), left[len(piece) :]
                if done % CHUNK_BYTES == 0:
                    digests.append(digest.digest())
                    digest = xxh3_128()
                    os.posix_fadvise(  # Linux begins to write it
                        handle.fileno(), done - CHUNK_BYTES, CHUNK_BYTES, os.POSIX_FADV_DONTNEED
                    )
    digests += [digest.digest()] if done % CHUNK_BYTES else []
    return {"name": file.name, "bytes": done, DIGEST: xxh3_128(b"".join(digests)).hexdigest()}


def _header(tensors: Mapping[str, Tensor], order: list[str]) -> bytes:
    entries, end = {}, 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        entry = {"dtype": _dtype_name(tensors[name].dtype), "shape": [*tensors[name].shape]}
        entries[name] = {**entry, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    """The one that safetensors gives it."""
    try:
        entry = json.loads(save({"": torch.empty(1, dtype=dtype)})[8 : -dtype.itemsize])[""]
    except (KeyError, RuntimeError):
        entry = {"shape": None}
    if entry["shape"] != [1]:  # or it has several numbers in one byte
        raise CheckpointError(f"a checkpoint cannot hold tensors of {dtype}")
    return str(entry["dtype"])


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
